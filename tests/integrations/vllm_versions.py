"""A vLLM engine on a CPU takes three versions; each is compared with a fresh engine.

Run by test_weights.py with the path of a folder.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

from atoll.weights import Follower, Publisher

SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 128,
    "enforce_eager": True,
    "max_num_seqs": 4,
}


def probabilities(engine: Any) -> list[tuple[int, float]]:
    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=1, detokenize=False)
    prompt = {"prompt_token_ids": [1, 2, 3, 4, 5, 6]}
    (answer,) = engine.generate([prompt], sampling, use_tqdm=False)[0].outputs
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return [(token, next(iter(row.values())).logprob) for token, row in pairs]


def parameters(engine: Any) -> dict[str, torch.Tensor]:
    def read(worker: Any) -> dict[str, torch.Tensor]:
        model = worker.model_runner.model
        return {name: each.detach().clone() for name, each in model.named_parameters()}

    (found,) = engine.collective_rpc(read)
    return found  # type: ignore[no-any-return]


def main(folder: str) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(f"{folder}/first")
    engine = LLM(
        f"{folder}/first", weight_transfer_config=WeightTransferConfig(backend="atoll"), **SETTINGS
    )
    uri = f"file://{folder}/channel"
    publisher = Publisher(uri, files=f"{folder}/first", full_every=2)
    engine.init_weight_transfer_engine({"init_info": {"uri": uri}})
    follower, before = Follower(uri), probabilities(engine)
    for step in range(3):
        with torch.no_grad():
            for each in model.parameters():
                each.add_(torch.randn_like(each) * each.abs().mean() * 0.3)
        version = publisher.publish(model.named_parameters(), step=step)
        engine.start_weight_update()
        engine.update_weights({"update_info": {"number": version.number}})
        engine.finish_weight_update()
        after = probabilities(engine)
        assert follower.next() == version
        fresh = LLM(follower.write(f"{folder}/out"), **SETTINGS)
        ours, others = parameters(engine), parameters(fresh)
        row = {
            "parameters": all(torch.equal(ours[name], others[name]) for name in others),
            "log_probabilities": after == probabilities(fresh),
            "is_other": after != before,
        }
        del fresh
        before = after
        sys.stdout.write(f"\nROW {json.dumps(row)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
