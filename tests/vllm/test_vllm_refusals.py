"""What is refused before an engine starts, and what it says.  Most of it needs no vLLM."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from vllm_kit import spec_of

from tutelage.config.vllm import VLLMConfig
from tutelage.errors import ConfigError, MissingExtraError, ModelError, RolloutError
from tutelage.rollout.vllm import checks
from tutelage.rollout.vllm.engine import VLLMRollout
from tutelage.rollout.vllm.order import HybridOrder, Phase
from tutelage.rollout.vllm.server import VLLMServer


def model(**changes):
    values = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 192, "max_position_embeddings": 512}
    return SimpleNamespace(**values | {"head_dim": 32} | changes)


def test_vllm_missing_names_the_command(monkeypatch, tiny_llama_folder, tiny_tokenizer):
    monkeypatch.setattr(checks, "installed", lambda name: False)
    with pytest.raises(MissingExtraError, match="make vllm"):
        VLLMRollout(spec_of(tiny_llama_folder, tiny_tokenizer))


@pytest.mark.parametrize(
    ("changes", "config", "error", "said"),
    [
        ({"head_dim": 16}, {}, ModelError, "head_dim is 16"),
        ({"head_dim": None, "hidden_size": 96}, {}, ModelError, "head_dim is 16"),
        (
            {},
            {"mode": "separate", "tensor_parallel": 4},
            ConfigError,
            r"not divide the model's 6 .*\[1, 2, 3, 6\]",
        ),
        ({}, {"mode": "separate", "tensor_parallel": 3}, ConfigError, r"2 key/value heads .*one of \[1, 2, 6\]"),
        ({}, {"tensor_parallel": 2}, ConfigError, "mode colocated"),
        ({}, {"max_model_len": 600}, ConfigError, "max_model_len is 600, the model's context is 512"),
    ],
)
def test_models_and_layouts_that_do_not_fit(changes, config, error, said):
    with pytest.raises(error, match=f"(?s){said}"):
        checks.require_servable(model(**changes), VLLMConfig(**config), "cpu")


def test_what_fits_is_taken():
    checks.require_servable(model(), VLLMConfig(mode="separate", tensor_parallel=2), "cpu")
    checks.require_servable(model(head_dim=16), VLLMConfig(), "cuda")


def test_a_tokenizer_that_numbers_a_token_otherwise_is_named(tiny_llama_folder, tiny_gpt2_folder, make_tokenizer):
    tokenizer = make_tokenizer()
    spec_of(tiny_llama_folder, tokenizer).check()
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(RolloutError, match=r"tokenizer has 114 tokens, the engine's model .* has 113 embeddings"):
        spec_of(tiny_llama_folder, tokenizer).check()
    with pytest.raises(RolloutError, match=r"tokens, the engine's model|token '\S+' is \d+ for the policy"):
        spec_of(tiny_gpt2_folder, make_tokenizer()).check()


def test_truncation_and_temperatures_that_vllm_would_change(tiny_llama_folder, tiny_tokenizer):
    with pytest.raises(RolloutError, match="top_k=5"):
        spec_of(tiny_llama_folder, tiny_tokenizer, top_k=5).check()
    with pytest.raises(RolloutError, match=r"temperature is 0.001, vLLM would use 0.01"):
        spec_of(tiny_llama_folder, tiny_tokenizer, temperature=0.001).check()


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RolloutError, match=f"port {port} of 127.0.0.1 is taken"):
            checks.require_free_port(port)
        with pytest.raises(RolloutError, match="is taken"):
            VLLMServer.of("model", VLLMConfig(mode="server", port=port), "float32", "cpu", 0)
    assert checks.require_free_port(0) > 0


def test_a_server_that_is_not_there_is_given_up_after_its_deadline():
    port = checks.require_free_port(0)
    config = VLLMConfig(mode="server", url=f"http://127.0.0.1:{port}", start_timeout=0.5)
    with pytest.raises(RolloutError, match=r"not healthy within 0.5 s"):
        VLLMServer.of("model", config, "float32", "cpu", 0)
    with pytest.raises(RolloutError, match="http://HOST:PORT"):
        VLLMServer("127.0.0.1:8000", config)


@pytest.mark.vllm
def test_a_kv_cache_that_is_too_small_says_which_setting(tiny_llama_folder, tiny_tokenizer):
    spec = spec_of(tiny_llama_folder, tiny_tokenizer, config={"kv_cache_memory_bytes": 200 << 30})
    with pytest.raises(RolloutError, match=r"(?s)no memory for its KV cache.*kv_cache_memory_bytes is 214748364800"):
        VLLMRollout(spec)


@pytest.mark.vllm
def test_an_unknown_engine_argument_is_named(tiny_llama_folder, tiny_tokenizer):
    with pytest.raises(RolloutError, match="no_such_setting"):
        VLLMRollout(spec_of(tiny_llama_folder, tiny_tokenizer, config={"engine_args": {"no_such_setting": 1}}))


# ---- the order of a hybrid engine ----


def test_the_order_after_both_levels():
    for level in (1, 2):
        order = HybridOrder()
        order.publish()  # awake: at any time
        order.sleep(level)
        order.wake_weights()
        order.publish()
        order.trainer_freed()
        order.wake_kv_cache()
        order.require_awake()
    order.sleep(1)
    order.wake_weights()
    order.trainer_freed()  # level 1 brought the weights back: nothing new need come
    order.wake_kv_cache()
    assert order.phase is Phase.AWAKE


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ([], "wake_weights"),
        ([], "trainer_freed"),
        ([], "wake_kv_cache"),
        (["sleep"], "sleep"),
        (["sleep"], "publish"),
        (["sleep"], "require_awake"),
        (["sleep"], "wake_kv_cache"),
        (["sleep", "wake_weights"], "trainer_freed"),
        (["sleep", "wake_weights"], "wake_kv_cache"),
        (["sleep", "wake_weights", "publish"], "wake_kv_cache"),
        (["sleep", "wake_weights", "publish"], "require_awake"),
        (["sleep", "wake_weights", "publish", "trainer_freed"], "publish"),
        (["sleep", "wake_weights", "publish", "trainer_freed"], "require_awake"),
    ],
)
def test_every_wrong_step_is_refused_and_changes_nothing(steps, wrong):
    order = HybridOrder()

    def take(step):
        getattr(order, step)(*((2,) if step == "sleep" else ()))

    for step in steps:
        take(step)
    phase = order.phase
    with pytest.raises(RolloutError, match="the order is"):
        take(wrong)
    assert order.phase is phase


def test_a_level_that_does_not_exist():
    with pytest.raises(RolloutError, match="sleep level is 3"):
        HybridOrder().sleep(3)
