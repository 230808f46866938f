"""Three DiLoCo replicas on Modal that meet in an S3 bucket. One is killed and restarts.

STORE=s3://my-bucket/runs SECRET=aws IMAGE=ghcr.io/me/train:1 python examples/modal_diloco.py

Modal Sandboxes cannot reach each other: the replicas exchange their work through the bucket, and
the records of how each ended are there, too. `SECRET` names a secret of Modal with
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION; this machine needs the same rights. The
image needs the same version of Python, torch and atoll[store].
"""

import os

from atoll import ModalExecutor

STORE = os.environ.get("STORE", "s3://my-bucket/runs")


def train(rounds: int, step_s: float, rendezvous_uri: str) -> dict[str, object]:
    import hashlib
    import os
    import signal
    import time

    import torch

    from atoll.diloco import DiLoCo

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = os.environ["ATOLL_ATTEMPT"] == "0"
    # Rounds here last seconds, so a round waits seconds for a late replica.
    with DiLoCo(model, inner, sync_every=10, outer_momentum=0.5, grace_s=2.0) as diloco:
        dice = torch.Generator().manual_seed(diloco.config.rank)
        while diloco.round < rounds:
            if diloco.config.rank == 1 and first and diloco.round == 2:
                os.kill(os.getpid(), signal.SIGKILL)  # as if the machine were lost
            x = torch.randn(32, 8, generator=dice)
            loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            inner.step()
            inner.zero_grad()
            time.sleep(step_s)  # a real model takes longer
            print(f"round {diloco.round} loss {loss.item():.4f}", flush=True)
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return {"loss": round(loss.item(), 4), "weights": hashlib.sha256(weights).hexdigest()[:12]}


if __name__ == "__main__":
    executor = ModalExecutor(
        os.environ.get("IMAGE", "ghcr.io/me/train:1"),
        store=STORE,
        secrets=[os.environ.get("SECRET", "aws")],
        python=os.environ.get("IMAGE_PYTHON", "python3"),
        max_restarts=int(os.environ.get("RESTARTS", "1")),
        poll_s=float(os.environ.get("POLL_S", "2")),
    )
    arguments = {
        "rounds": int(os.environ.get("ROUNDS", "12")),
        "step_s": float(os.environ.get("STEP_S", "0.5")),
        "rendezvous_uri": f"{STORE}/{os.environ.get('RUN', 'tiny-1')}",
    }
    with executor:
        handles = executor.launch_replicas(3, train, arguments, gpu=os.environ.get("GPU"))
        print("launched:", handles[0].metadata["job_name"], flush=True)
        for report in executor.collect(handles):
            print(report["rank"], report["status"], report["exit_code"], report["result"])
