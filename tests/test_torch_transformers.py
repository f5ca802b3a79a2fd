"""patch_transformers: models of tiny configurations, unchanged, through our ops: prefill, decode, a training step."""

from __future__ import annotations

import importlib
from pydoc_data import topics

import pytest
from harness import check

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
import pylinattn.torch as ours  # noqa: E402
from pylinattn.ops import OPS  # noqa: E402

TOLERANCE = 2e-5  # relative RMS in fp32, through whole models
GRADIENTS = 2e-5
# A_log and dt_bias: sums of terms that cancel, where the model's own float32 function is up to 5e-3 from float64
GATE_GRADIENTS = 1e-2

QWEN = dict(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    max_position_embeddings=4096,
)  # fmt: skip
KIMI = dict(
    vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
    num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1,
    kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16,
    num_experts_per_tok=2, num_local_experts=4, linear_head_dim=32, linear_num_heads=4,
    max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", QWEN, "gdn"),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", KIMI, "kda"),
}


@pytest.fixture(params=MODELS)
def tiny(request):
    """A tiny model with random weights, its number of linear layers and the ops they need."""
    config_class, model_class, sizes, family = MODELS[request.param]
    try:
        package = importlib.import_module(f"transformers.models.{request.param}")
    except ImportError:
        pytest.skip(f"this transformers has no {request.param}")
    torch.manual_seed(0)
    config = getattr(package, config_class)(**sizes)
    model = getattr(package, model_class)(config).eval()
    linear = sum(kind == "linear_attention" for kind in config.layer_types)
    yield request.param, model, linear, family
    ours.unpatch_transformers()


@pytest.fixture
def called(monkeypatch):
    """Names of our ops, one for each call."""
    names = []
    for family in ("gdn", "kda"):
        for kind in ("fwd", "decode", "bwd"):
            op = OPS[f"{family}_{kind}"].op
            counted = lambda args, op=op, run=op.run: names.append(op.name) or run(args)  # noqa: E731
            monkeypatch.setattr(op, "run", counted)
    return names


def text_bytes(count):
    """Bytes of the page on Python's execution model, which Python itself carries for help()."""
    return torch.tensor(list(topics.topics["execmodel"].encode()[:count]))[None]


def relative_rms(got, want):
    return ((got - want).double().square().mean() / want.double().square().mean()).sqrt().item()


def check_close(got, want, what, limit=TOLERANCE):
    error = relative_rms(got, want)
    check(error < limit, f"{what}: {error:.2e} from the model's own functions")


def prefill_and_decode(model, ids, prompt):
    outputs, cache = [], None
    with torch.no_grad():
        for piece in (ids[:, :prompt], *(ids[:, t : t + 1] for t in range(prompt, ids.shape[1]))):
            done = model(piece, past_key_values=cache, use_cache=True)
            cache = done.past_key_values
            outputs.append(done.logits)
    return torch.cat(outputs, 1)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_prefill_and_decode(tiny, called):
    name, model, linear, family = tiny
    ids = text_bytes(150)
    want = prefill_and_decode(model, ids, 130)
    check(not called, "our ops were called before the patch")
    check(ours.patch_transformers([name]) == (name,), "not patched")
    got = prefill_and_decode(model, ids, 130)
    expected = [f"{family}_fwd"] * linear + [f"{family}_decode"] * 20 * linear
    check(called == expected, f"{len(called)} calls: {set(called)}, {linear} linear layers")
    check_close(got, want, "logits")
    check(torch.equal(got.argmax(-1), want.argmax(-1)), "another most likely byte")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_training_step(tiny, called):
    """Loss, every parameter's gradient, and the loss after one step of SGD."""
    name, model, linear, family = tiny
    model.train()
    ids = text_bytes(200).reshape(2, 100)
    weights = {key: value.clone() for key, value in model.state_dict().items()}

    def step():
        model.load_state_dict(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = {
            key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
        with torch.no_grad():
            return loss.detach(), gradients, model(ids, labels=ids, use_cache=False).loss

    want_loss, want, want_after = step()
    ours.patch_transformers([name])
    got_loss, got, got_after = step()
    ours_in_training = called[: 2 * linear]
    check(
        ours_in_training == [f"{family}_fwd"] * linear + [f"{family}_bwd"] * linear,
        f"called were {ours_in_training}",
    )
    check_close(got_loss, want_loss, "loss")
    check_close(got_after, want_after, "loss after a step")
    check(want_after < want_loss, "the step does not lower the loss")
    check(got.keys() == want.keys(), "other parameters have gradients")
    for key, gradient in want.items():
        if gradient.square().sum() > 0:
            limit = GATE_GRADIENTS if key.endswith(("A_log", "dt_bias")) else GRADIENTS
            check_close(got[key], gradient, f"gradient of {key}", limit)


def test_unpatch_gives_everything_back():
    patched = ours.patch_transformers()
    check("qwen3_next" in patched, f"patched were {patched}")
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    name = "torch_chunk_gated_delta_rule"
    replaced = getattr(module, name)
    check(ours.patch_transformers() == patched, "patching twice")
    check(getattr(module, name) is replaced, "patched twice")
    ours.unpatch_transformers()
    check(getattr(module, name) is not replaced, "still patched")
    ours.unpatch_transformers()


def test_unknown_model():
    with pytest.raises(ValueError, match="bert"):
        ours.patch_transformers("bert")


def test_packed_sequences():
    """What the models' own torch functions refuse."""
    patched = ours.patch_transformers(["qwen3_next"])
    check(patched == ("qwen3_next",), "not patched")
    try:
        module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
        q, k, v = torch.randn(3, 1, 30, 2, 16)
        g, beta = -torch.rand(1, 30, 2), torch.rand(1, 30, 2)
        function = module.torch_chunk_gated_delta_rule
        both = function(q, k, v, g, beta, cu_seqlens=torch.tensor([0, 20, 30]))[0]
        alone = function(*(x[:, 20:] for x in (q, k, v, g, beta)))[0]
        check_close(both[:, 20:], alone, "the second packed sequence")
    finally:
        ours.unpatch_transformers()
