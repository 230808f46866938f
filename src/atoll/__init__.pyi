"""The public names with their types."""

from atoll.agent.metrics import report as report
from atoll.agent.metrics import report_settings as report_settings
from atoll.agent.result import set_result as set_result
from atoll.core.errors import AtollError as AtollError
from atoll.core.errors import BackendError as BackendError
from atoll.core.errors import BelowMinimumWorld as BelowMinimumWorld
from atoll.core.errors import Conflict as Conflict
from atoll.core.errors import Denied as Denied
from atoll.core.errors import DistributedError as DistributedError
from atoll.core.errors import Gone as Gone
from atoll.core.errors import NotFound as NotFound
from atoll.core.errors import Permanent as Permanent
from atoll.core.errors import ResultError as ResultError
from atoll.core.errors import Temporary as Temporary
from atoll.core.errors import UDTerminalState as UDTerminalState
from atoll.core.errors import ValidationError as ValidationError
from atoll.core.errors import WorldSizeOutOfBounds as WorldSizeOutOfBounds
from atoll.core.spec import ProviderFilter as ProviderFilter
from atoll.core.spec import WorldSize as WorldSize
from atoll.core.status import BenchResult as BenchResult
from atoll.core.status import RankExit as RankExit
from atoll.core.status import RankStatus as RankStatus
from atoll.core.status import WorldStatus as WorldStatus
from atoll.diloco.allreduce import ObjectStoreAllReduce as ObjectStoreAllReduce
from atoll.mesh.gate import mesh_status as mesh_status
from atoll.replicas.hfjobs import HFJobsExecutor as HFJobsExecutor
from atoll.replicas.kubernetes import EKSExecutor as EKSExecutor
from atoll.replicas.kubernetes import KubernetesExecutor as KubernetesExecutor
from atoll.replicas.local import LocalProcessExecutor as LocalProcessExecutor
from atoll.replicas.modal import ModalExecutor as ModalExecutor
from atoll.replicas.modal import ModalSpawnExecutor as ModalSpawnExecutor
from atoll.replicas.protocol import ReplicaHandle as ReplicaHandle
from atoll.replicas.protocol import ServerlessExecutor as ServerlessExecutor
from atoll.replicas.sagemaker import SageMakerExecutor as SageMakerExecutor
from atoll.replicas.slurm import SlurmExecutor as SlurmExecutor
from atoll.sdk.client import Client as Client
from atoll.sdk.sweep import distributed as distributed
from atoll.sdk.training import DistributedTraining as DistributedTraining

__version__: str
__all__: list[str]

# Defined here, as a module of that name is there for `python -m`.
def mesh_wait(timeout: float = 60) -> None: ...
