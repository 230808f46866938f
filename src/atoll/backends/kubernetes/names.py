"""Labels, annotations, finalizers and conditions that say what an object is to atoll."""

GROUP = "atoll.dev"  # of the API with trainings, and its version
VERSION = "v1"

MANAGED = "app.kubernetes.io/managed-by"
TRAINING = "atoll.dev/training"
NAMESPACE = "atoll.dev/namespace"
UID = "atoll.dev/uid"
PLANE = "atoll.dev/plane"  # the control plane it belongs to; the operator's has none
PART = "atoll.dev/part"  # of a training: its ranks, or what runs beside them
LOG_OF = "atoll.dev/log-of-rank"
DESIRED = "atoll.dev/desired"
RELEASED = "atoll.dev/released"
SHRINKS = "atoll.dev/shrinks"
YIELDED = "atoll.dev/yielded"
BLOCKED_BY = "atoll.dev/blocked-by"  # what a suspended Job waits for: its etcd
GATE_OPENED = "atoll.dev/gate-opened"
GATE_COUNT = "atoll.dev/gate-count"  # of the ranks that it let go
START = "atoll.dev/start"
STOPPED = "atoll.dev/Stopped"
LAUNCH = "atoll.dev/launch"  # the spec of a launch from a script
STOP_CAUSE = "atoll.dev/stop-cause"  # why its ranks were stopped, if it was not cancelled
CODE = "atoll.dev/code"  # the beginning of a digest
FINALIZER = "atoll.dev/exit"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE = "kueue.x-k8s.io/queue-name"
ELASTIC = "kueue.x-k8s.io/elastic-job"
PROVIDER = "atoll.dev/provider"
REGION = "topology.kubernetes.io/region"
SELECTOR = f"{MANAGED}=atoll"

CONTAINER = "rank"
REPLICA = "replica"  # the same of a launch from a script
ETCD = "etcd"
BENCH = "bench"
AGENT = "atoll-fabric"
GATE = "start-gate"
REPORT_DIR = "/atoll/agent"  # where a rank's container finds agent/process.py
REPORT_VOLUME = "atoll-report"  # the names of volumes
SOURCE = "source"
CODE_VOLUME = "atoll-code"
ARCHIVE_VOLUME = "atoll-archive"
REPORT_KEY = "atoll-report-key"  # a Secret in the operator's namespace
