"""Replicas on Hugging Face Jobs, launched from a script: `HFJobsExecutor`."""

from __future__ import annotations

from atoll.backends.hfjobs.options import HFJobsOptions
from atoll.replicas.recorded import StoreReplicas


class HFJobsExecutor(StoreReplicas):
    """Replicas as jobs of Hugging Face Jobs, one for each attempt of each.

    `image` has Python and `atoll[store]`; `store` is an object store that the jobs and this machine
    reach, with the records and logs of all launches. Other `options` are those of
    `HFJobsOptions`. `command` runs exactly as it is, in the image; without it the code of the
    entrypoint is sent along, with the working directory unless `code` is False. `max_restarts`:
    how often each replica is restarted. Bad options raise ValidationError here.
    """

    backend_name = "hfjobs"
    _launch_noun = "set of jobs"
    _options_type = HFJobsOptions
    _required = {
        "image": "expected an image: replicas run in containers",
        "store": "expected s3://, gs:// or az://: records and logs of launches are there",
    }
