"""pylinattn.torch on a GPU: outputs and gradients against a float64 token loop, compiled, captured, and in real models."""

from __future__ import annotations

import inspect

import pytest
from harness import check

torch = pytest.importorskip("torch")
from gpu_tools import capture  # noqa: E402
from test_torch import Problem, both, check_close, opcheck, relative_rms  # noqa: E402

import pylinattn  # noqa: E402
import pylinattn.torch as ours  # noqa: E402
from pylinattn import _transformers  # noqa: E402

pytestmark = pytest.mark.gpu
OUTPUTS, STATES, GRADIENTS = 5e-3, 3e-3, 1e-2  # relative RMS, of the targets


def problems(case, per_channel, D, dtype=torch.bfloat16):
    """The same values in float64 on the CPU, and as a model has them on the GPU."""
    exact = Problem(case, per_channel, dtype, K=D, V=D, grad=False)
    fast = Problem(case, per_channel, dtype, K=D, V=D, grad=False)
    for name, x in exact.tensors().items():
        wide = name in ("g", "beta", "state", "A_log", "dt_bias")
        value = x.float() if wide else x
        setattr(exact, name, value.double().requires_grad_())
        setattr(fast, name, value.cuda().requires_grad_())
    if fast.cu is not None:
        fast.cu = fast.cu.cuda()
    return exact, fast


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("D", [64, 128])
def test_outputs_and_gradients(gpu, per_channel, case, D, dtype):
    exact, fast = problems(case, per_channel, D, dtype)
    want, got = exact.plain(), fast.ours()
    for mine, theirs, what, limit in zip(got, want, ("o", "state"), (OUTPUTS, STATES)):
        check(mine.is_cuda, f"{what} is on {mine.device}")
        check_close(mine.cpu(), theirs, what, limit)
    d_o, d_final = (torch.randn_like(x) for x in got)
    names, tensors = zip(*exact.tensors().items())
    want = torch.autograd.grad(want, tensors, (d_o.cpu().double(), d_final.cpu().double()))
    got = torch.autograd.grad(got, list(fast.tensors().values()), (d_o, d_final))
    for name, mine, theirs in zip(names, got, want):
        check_close(mine.cpu(), theirs, f"d{name}", GRADIENTS)


@both
def test_recurrent_calls(gpu, per_channel, case):
    exact, fast = problems(case, per_channel, 64)
    with torch.no_grad():
        for mine, theirs, what, limit in zip(
            fast.ours(recurrent=True), exact.plain(), ("o", "state"), (OUTPUTS, STATES)
        ):
            check_close(mine.cpu(), theirs, what, limit)
    check(pylinattn.last_path().startswith("cuda/"), pylinattn.last_path())


@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_opcheck(gpu, per_channel):
    case = dict(gate="softplus", sigmoid=True, l2norm=True, state=True, v_first=True)
    _, problem = problems(case, per_channel, 64)
    opcheck(problem, per_channel, True)


@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_compiled(gpu, per_channel):
    case = dict(gate="softplus", sigmoid=True, l2norm=True, state=True)
    _, problem = problems(case, per_channel, 64)
    compiled = torch.compile(problem.ours, fullgraph=True, backend="aot_eager")
    tensors = list(problem.tensors().values())
    for mine, theirs in zip(compiled(), problem.ours()):
        check(torch.equal(mine, theirs), "compiled and eager outputs differ")
    got = torch.autograd.grad([x.sum() for x in compiled()], tensors)
    want = torch.autograd.grad([x.sum() for x in problem.ours()], tensors)
    for mine, theirs in zip(got, want):
        check(torch.equal(mine, theirs), "compiled and eager gradients differ")


@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_captured_training_step(gpu, per_channel):
    """Forward and backward in one CUDA graph, replayed with other values."""
    _, problem = problems(dict(l2norm=True, sigmoid=True), per_channel, 64)
    tensors = list(problem.tensors().values())

    def step():
        o, final = problem.ours()
        return torch.autograd.grad((o.float().square().sum(), final.square().sum()), tensors)

    results = []
    graph = capture(lambda: results.append(step()))
    captured = results[-1]
    for _ in range(3):
        with torch.no_grad():
            problem.v.normal_()
            problem.k.normal_()
        graph.replay()
        for mine, theirs in zip(captured, step()):
            check(torch.equal(mine, theirs), "a replay and an eager step differ")


MODELS = pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])


@MODELS
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_models(gpu, name, monkeypatch):
    """Tiny models in bf16: logits of prefill and decode, the loss and its gradients, nearer to float32 than the model's own."""
    pytest.importorskip("transformers")
    import importlib

    from test_torch_transformers import MODELS as CONFIGS
    from test_torch_transformers import prefill_and_decode, text_bytes

    config_class, model_class, sizes, _ = CONFIGS[name]
    try:
        package = importlib.import_module(f"transformers.models.{name}")
    except ImportError:
        pytest.skip(f"this transformers has no {name}")
    # Where FLA can be imported they are FLA's, on the CPU too.
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    for function in _transformers._FUNCTIONS:
        if hasattr(module, function):
            monkeypatch.setattr(module, function, inspect.unwrap(getattr(module, function)))
    heads = {key: 64 for key in sizes if key.startswith("linear_") and key.endswith("_dim")}
    # Every expert sees every token: a choice that rounding turns is another gradient.
    heads["num_experts_per_tok"] = sizes.get("num_experts") or sizes["num_local_experts"]
    torch.manual_seed(0)
    config = getattr(package, config_class)(**(sizes | heads))
    model = getattr(package, model_class)(config).eval().to(torch.bfloat16)
    # A gradient of four numbers has a chance error: several texts make it the error of more numbers.
    texts = text_bytes(4 * 150).split(150, dim=1)

    def everything(model, texts):
        logits, losses, grads = [], [], {}
        for ids in texts:
            logits.append(prefill_and_decode(model, ids, 130))
            model.zero_grad()
            losses.append(model(ids, labels=ids, use_cache=False).loss)
            losses[-1].backward()
            for key, parameter in model.named_parameters():
                if parameter.grad is not None:
                    grads.setdefault(key, []).append(parameter.grad.float().cpu().clone())
        together = [torch.stack([x.detach().float().cpu() for x in xs]) for xs in (logits, losses)]
        return *together, {key: torch.stack(values) for key, values in grads.items()}

    exact = everything(model.float(), texts)
    model = model.to(torch.bfloat16).cuda()
    texts = [ids.cuda() for ids in texts]
    own = everything(model, texts)
    try:
        check(ours.patch_transformers([name]) == (name,), "not patched")
        got = everything(model, texts)
    finally:
        ours.unpatch_transformers()
    check(pylinattn.last_path().startswith("cuda/"), pylinattn.last_path())
    for mine, theirs, want, what in zip(got[:2], own[:2], exact[:2], ("logits", "loss")):
        limit = 1.25 * relative_rms(theirs, want) + 2e-3
        check_close(mine, want, f"{name}: {what}", limit)
    check(got[2].keys() == exact[2].keys(), "other parameters have gradients")
    for key, want in exact[2].items():
        if want.square().sum() > 0:
            limit = 1.25 * relative_rms(own[2][key], want) + 1e-2
            check_close(got[2][key], want, f"{name}: gradient of {key}", limit)
