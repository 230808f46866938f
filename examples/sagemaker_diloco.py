"""Three DiLoCo replicas on SageMaker that meet in an S3 bucket. One is killed, the others finish.

ROLE=arn:aws:iam::123456789012:role/trainer STORE=s3://my-bucket/runs \\
    IMAGE=123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1 python examples/sagemaker_diloco.py

Training jobs cannot reach each other: the replicas exchange their work through the bucket, and the
records of how each ended are there, too. The image needs the same version of Python, torch and
atoll[store]; the role and this machine need the right to read and write the bucket.
"""

import os

from atoll import SageMakerExecutor

STORE = os.environ.get("STORE", "s3://my-bucket/runs")


def train(rounds: int, rendezvous_uri: str) -> dict[str, object]:
    import hashlib
    import os
    import signal

    import torch

    from atoll.diloco import DiLoCo

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = os.environ["ATOLL_ATTEMPT"] == "0"
    with DiLoCo(model, inner, sync_every=10, outer_momentum=0.5, grace_s=2.0) as diloco:
        dice = torch.Generator().manual_seed(diloco.config.rank)
        while diloco.round < rounds:
            if diloco.config.rank == 1 and first and diloco.round == 2:
                os.kill(os.getpid(), signal.SIGKILL)  # as if the instance were lost
            x = torch.randn(32, 8, generator=dice)
            loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            inner.step()
            inner.zero_grad()
            print(f"round {diloco.round} loss {loss.item():.4f}", flush=True)
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return {"loss": round(loss.item(), 4), "weights": hashlib.sha256(weights).hexdigest()[:12]}


if __name__ == "__main__":
    executor = SageMakerExecutor(
        os.environ.get("IMAGE", "train:1"),
        role=os.environ.get("ROLE", "arn:aws:iam::123456789012:role/trainer"),
        store=STORE,
        instance_type=os.environ.get("INSTANCE", "ml.m5.xlarge"),
        python=os.environ.get("IMAGE_PYTHON", "python3"),
        max_restarts=int(os.environ.get("RESTARTS", "0")),
        poll_s=float(os.environ.get("POLL_S", "2")),
    )
    arguments = {
        "rounds": int(os.environ.get("ROUNDS", "12")),
        "rendezvous_uri": f"{STORE}/{os.environ.get('RUN', 'tiny-1')}",
    }
    with executor:
        handles = executor.launch_replicas(3, train, arguments, gpu=os.environ.get("GPU"))
        print("launched:", handles[0].metadata["job_name"], flush=True)
        for report in executor.collect(handles):
            print(report["rank"], report["status"], report["exit_code"], report["result"])
