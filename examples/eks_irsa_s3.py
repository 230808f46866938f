"""DiLoCo replicas on EKS that meet in an S3 bucket, with the rights of IRSA or Pod Identity.

BUCKET=my-bucket IMAGE=123.dkr.ecr.eu-west-1.amazonaws.com/train:1 python examples/eks_irsa_s3.py

The replicas need no network to each other: they exchange their work through the bucket. They have
the rights of the service account; no keys are in the image or in this script. Set up once:

    eksctl create iamserviceaccount --cluster my-cluster --namespace training --name trainer \\
        --attach-policy-arn arn:aws:iam::123:policy/train-bucket --approve

The policy needs s3:ListBucket on the bucket and s3:GetObject, s3:PutObject, s3:DeleteObject on
its objects. `--dry-run` prints what would be created, for `kubectl create --dry-run=server`.
The command runs in the image, where DiLoCo finds its rank and the store by itself:

    with DiLoCo(model, inner, sync_every=500) as diloco: ...
"""

import json
import os
import sys
import time

from atoll import EKSExecutor

BUCKET = os.environ.get("BUCKET", "my-bucket")
RUN = os.environ.get("RUN_ID", "tiny-gpt-1")

executor = EKSExecutor(
    os.environ.get("IMAGE", "123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1"),
    namespace=os.environ.get("NAMESPACE", "training"),
    service_account_name="trainer",
    command=["python", "/app/train.py"],
    cpu_request="8",
    memory_request="64Gi",
    run_id=RUN,
)
launch = {
    "n_replicas": 4,
    "entrypoint": "train.py",
    "entrypoint_args": {
        "rendezvous_uri": f"s3://{BUCKET}/{RUN}",
        "aws_region": "eu-west-1",
        "lr": 4e-4,
    },
    "gpu": "A100",
    "timeout": 6 * 3600,
}

if "--dry-run" in sys.argv:
    objects = executor.render_replicas(**launch)
    print(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=1))
    raise SystemExit

handles = executor.launch_replicas(**launch)
print("launched:", handles[0].to_json())  # any process can use these handles
while any(executor.poll(handle) in ("pending", "running") for handle in handles):
    time.sleep(30)
    print({handle.rank: executor.poll(handle) for handle in handles}, flush=True)
for report in executor.collect(handles):
    print(report["rank"], report["status"], report["exit_code"], report["error"] or "")
