"""Our op inside Qwen3-Next of the transformers library, on real text, and against that library's own torch functions."""

from __future__ import annotations

import contextlib
from pydoc_data import topics

import pytest
from harness import check

import pylinattn

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
from transformers.models.qwen3_next import Qwen3NextConfig  # noqa: E402

TOLERANCE = 2e-5  # relative RMS in fp32, through whole layers


def text_bytes(count):
    """Bytes as token ids of the page on Python's execution model, which Python itself carries for help()."""
    text = topics.topics["execmodel"].encode()
    check(len(text) >= count, "too little text")
    return torch.tensor(list(text[:count]))[None]


calls = []  # one entry per call of an op of ours


def relative_rms(got, want):
    return ((got - want).double().square().mean() / want.double().square().mean()).sqrt().item()


def ours(
    query,
    key,
    value,
    g,
    beta,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    **_,
):
    """The signature of the library's functions over gdn_fwd."""
    done = pylinattn.gdn_fwd(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )
    calls.append("fwd")
    return done.o, done.final_state


def ours_decode(query, key, value, g, beta, initial_state=None, use_qk_l2norm_in_kernel=False, **_):
    """The same over gdn_decode, in place on the recurrent state."""
    state = initial_state.clone()
    o = pylinattn.gdn_decode(query, key, value, g, beta, state, qk_l2norm=use_qk_l2norm_in_kernel)
    calls.append("decode")
    return o, state


@contextlib.contextmanager
def replaced():
    """Our op in place of the model's chunk and recurrent functions."""
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    kept = [getattr(qwen, name) for name in names]
    calls.clear()
    try:
        for name, function in zip(names, (ours, ours_decode)):
            setattr(qwen, name, function)
        yield
    finally:
        for name, function in zip(names, kept):
            setattr(qwen, name, function)


def inputs(T, H=2, HV=4, K=32, V=32, B=2):
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    g = torch.nn.functional.logsigmoid(normal(B, T, HV)) / 4
    return (
        normal(B, T, H, K),
        normal(B, T, H, K),
        normal(B, T, HV, V),
        g,
        normal(B, T, HV).sigmoid(),
    )


@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("initial", [False, True], ids=["no_initial", "initial"])
def test_against_the_chunk_function(T, initial):
    arrays = inputs(T)
    state = (
        torch.randn(2, 4, 32, 32, generator=torch.Generator().manual_seed(1)) if initial else None
    )
    options = dict(initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    want = qwen.torch_chunk_gated_delta_rule(*arrays, **options)
    got = ours(*arrays, **options)
    for mine, theirs in zip(got, want):
        error = relative_rms(mine, theirs)
        check(error < TOLERANCE, f"T = {T}: {error:.2e} from transformers' chunk function")


@pytest.mark.parametrize("T", [1, 3, 40])
def test_against_the_recurrent_function(T):
    arrays = inputs(T)
    state = torch.randn(2, 4, 32, 32, generator=torch.Generator().manual_seed(1))
    want = qwen.torch_recurrent_gated_delta_rule(*arrays, state, True, True)
    got = ours_decode(*arrays, initial_state=state, use_qk_l2norm_in_kernel=True)
    for mine, theirs in zip(got, want):
        error = relative_rms(mine, theirs)
        check(error < TOLERANCE, f"T = {T}: {error:.2e} from transformers' recurrent function")


@pytest.fixture(scope="module")
def config():
    return Qwen3NextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=4096,
    )


def run(model, ids, prompt, **batch):
    """Prefill of a prompt, then token by token; every logit or hidden state in order."""
    outputs, cache = [], None
    with torch.no_grad():
        for piece in (ids[:, :prompt], *(ids[:, t : t + 1] for t in range(prompt, ids.shape[1]))):
            done = model(piece, past_key_values=cache, use_cache=True, **batch)
            cache = done.past_key_values
            outputs.append(done[0])
    return torch.cat(outputs, 1), cache


def test_layer_prefill_then_decode(config):
    """One gated-delta layer on embedded text: prefill, then decode with the layer's own cache."""
    from transformers.cache_utils import DynamicCache

    torch.manual_seed(0)
    layer = qwen.Qwen3NextGatedDeltaNet(config, layer_idx=0).eval()
    embedded = torch.nn.Embedding(256, config.hidden_size)(text_bytes(230))

    def states():
        cache, outputs = DynamicCache(config=config), []
        with torch.no_grad():
            for a, b in ((0, 200), *((t, t + 1) for t in range(200, 230))):
                outputs.append(layer(embedded[:, a:b], cache))
        return torch.cat(outputs, 1), cache.get_recurrent_state(0, state_idx=0)

    want = states()
    with replaced():
        got = states()
    check(calls == ["fwd"] + ["decode"] * 30, f"our ops were called as {calls}")
    for mine, theirs, what in zip(got, want, ("outputs", "recurrent state")):
        error = relative_rms(mine, theirs)
        check(error < TOLERANCE, f"{what}: {error:.2e} from the layer's own functions")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_model_prefill_then_decode(config):
    """A whole tiny Qwen3-Next, random weights, real text: logits of prefill and of 20 decode steps, and the argmax."""
    torch.manual_seed(0)
    model = qwen.Qwen3NextForCausalLM(config).eval()
    ids = text_bytes(150)
    want, _ = run(model, ids, 130)
    with replaced():
        got, _ = run(model, ids, 130)
    linear = sum(kind == "linear_attention" for kind in config.layer_types)
    check(len(calls) == linear * 21, f"our op was called {len(calls)} times by {linear} layers")
    error = relative_rms(got, want)
    check(error < TOLERANCE, f"logits: {error:.2e} from the model's own functions")
    check(torch.equal(got.argmax(-1), want.argmax(-1)), "another most likely byte")
