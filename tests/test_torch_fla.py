"""register_fla against small stand-ins of the two forms of FLA's dispatch, which itself needs Triton to be imported;
with an FLA that can be imported, against that."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
import typing

import pytest
from harness import check

import pylinattn

torch = pytest.importorskip("torch")
import pylinattn.torch as ours  # noqa: E402

OPERATIONS = {"chunk_gated_delta_rule": "gated_delta_rule", "chunk_kda": "kda"}
FALLBACK = "the default"


class BaseBackend:
    """The part of FLA's class that its dispatch reads."""

    backend_type, package_name, env_var, default_enable, priority = "base", None, None, True, 5

    @classmethod
    def is_available(cls):
        return cls.package_name is None or importlib.util.find_spec(cls.package_name) is not None

    def is_enabled(self):
        return self.env_var is None or os.environ.get(self.env_var, "1") != "0"

    def verify(self, name, *args, **kwargs):
        try:
            return getattr(self, f"{name}_verifier")(*args, **kwargs)
        except Exception as error:
            return False, str(error)


class Rival(BaseBackend):
    backend_type, priority = "rival", 3

    def verify(self, name, *args, **kwargs):
        return True, None

    def chunk_gated_delta_rule(self, *args, **kwargs):
        return self.backend_type

    chunk_kda = chunk_gated_delta_rule


class Registry:
    _registries: typing.ClassVar = {}  # by operation, as 0.5 has them

    def __init__(self):
        self._backends, self.reasons = {}, []

    def register(self, backend):
        self._backends[backend.backend_type] = backend

    @classmethod
    def ensure_initialized(cls, operation):
        cls._registries.setdefault(operation, cls()).register(Rival())

    def dispatch(self, function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            for backend in sorted(self._backends.values(), key=lambda b: b.priority):
                if not (backend.is_available() and backend.is_enabled()):
                    continue
                accepted, reason = backend.verify(function.__name__, *args, **kwargs)
                if accepted:
                    return getattr(backend, function.__name__)(*args, **kwargs)
                self.reasons.append(reason)
            return function(*args, **kwargs)

        return wrapper


def default_function(name):
    def function(*args, **kwargs):
        return FALLBACK

    function.__name__ = name
    return function


def modules_0_5():
    Registry._registries = {}
    for operation in OPERATIONS.values():
        Registry.ensure_initialized(operation)
    backends = types.SimpleNamespace(BaseBackend=BaseBackend, BackendRegistry=Registry)
    chunks = {
        f"fla.ops.{operation}.chunk": types.SimpleNamespace(
            **{name: Registry._registries[operation].dispatch(default_function(name))}
        )
        for name, operation in OPERATIONS.items()
    }
    return {"fla.ops.backends": backends} | chunks


def modules_0_6():
    """GDN asks the registry of its operation, KDA one of its own function."""
    defaults = {name: default_function(name) for name in OPERATIONS}
    by_operation = {operation: Registry() for operation in OPERATIONS.values()}
    own = Registry()
    registries = {"chunk_gated_delta_rule": by_operation["gated_delta_rule"], "chunk_kda": own}
    for registry in registries.values():
        registry.register(Rival())
    backends = types.SimpleNamespace(
        BaseBackend=BaseBackend,
        _operation_registries=by_operation,
        _function_registries={defaults["chunk_kda"]: own},
    )
    chunks = {
        f"fla.ops.{operation}.chunk": types.SimpleNamespace(
            **{name: registries[name].dispatch(defaults[name])}
        )
        for name, operation in OPERATIONS.items()
    }
    return {"fla.backends": backends} | chunks


@pytest.fixture(params=[modules_0_5, modules_0_6], ids=["0.5", "0.6"])
def fla(request, monkeypatch):
    """A stand-in for FLA, as the modules of its two functions."""
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    modules = request.param()
    packages = ("fla", "fla.ops", *(f"fla.ops.{operation}" for operation in OPERATIONS.values()))
    for name in packages:
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("FLA_PYLINATTN", raising=False)
    functions = {
        name: getattr(modules[f"fla.ops.{operation}.chunk"], name)
        for name, operation in OPERATIONS.items()
    }
    yield functions
    ours.unregister_fla()


def inputs(name, dtype=torch.float32, K=8):
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 20, 2, K, generator=random).to(dtype)
    g = -torch.rand(1, 20, 2, *(() if name == "chunk_gated_delta_rule" else (K,)), generator=random)
    return q, k, v, g, torch.rand(1, 20, 2, generator=random)


names = pytest.mark.parametrize("name", OPERATIONS)


@names
def test_ours_comes_first(fla, name):
    check(fla[name](*inputs(name)) == "rival", "the rival is not asked without us")
    ours.register_fla()
    ours.register_fla()
    o, final = fla[name](*inputs(name), use_qk_l2norm_in_kernel=True, output_final_state=True)
    want = getattr(ours, name)(*inputs(name), use_qk_l2norm_in_kernel=True, output_final_state=True)
    check(torch.equal(o, want[0]) and torch.equal(final, want[1]), "another result")
    ours.unregister_fla()
    check(fla[name](*inputs(name)) == "rival", "still there after unregister_fla")


@names
def test_environment_variable(fla, name, monkeypatch):
    ours.register_fla()
    monkeypatch.setenv("FLA_PYLINATTN", "0")
    check(fla[name](*inputs(name)) == "rival", "FLA_PYLINATTN=0 does not switch it off")
    monkeypatch.setenv("FLA_PYLINATTN", "1")
    check(fla[name](*inputs(name)) != "rival", "FLA_PYLINATTN=1 does not switch it on")


REFUSED = {
    "context_parallel": (dict(cp_context=object()), "context parallel"),
    "unknown": (dict(some_new_option=True), "some_new_option"),
}


@names
@pytest.mark.parametrize("refused", REFUSED)
def test_what_is_not_taken_goes_on(fla, name, refused):
    keywords, text = REFUSED[refused]
    ours.register_fla()
    check(fla[name](*inputs(name), **keywords) == "rival", "taken")
    check(text in refusal_of(name, **keywords), f"the reason is {refusal_of(name, **keywords)!r}")


def refusal_of(name, arrays=None, **keywords):
    from pylinattn import _fla_backend

    family = {"chunk_gated_delta_rule": "gdn", "chunk_kda": "kda"}[name]
    verify = _fla_backend._verifier(getattr(ours, name), family)
    accepted, reason = verify(*(inputs(name) if arrays is None else arrays), **keywords)
    check(accepted == (reason is None), f"accepted is {accepted}, but the reason {reason!r}")
    return reason


@names
def test_reasons(name):
    q, k, v, g, beta = inputs(name)
    check(refusal_of(name) is None, "a plain call is refused")
    check("one dtype" in refusal_of(name, (q, k, v.bfloat16(), g, beta)), "mixed dtypes")
    large = inputs(name, K=512)
    check("512" in refusal_of(name, large), f"K = 512: {refusal_of(name, large)}")
    q.requires_grad_()
    reason = refusal_of(name, (q, k, v, g, beta))
    supported = pylinattn.supports(
        "gdn_bwd" if name == "chunk_gated_delta_rule" else "kda_bwd",
        device="cpu", dtype=q.dtype, K=8, V=8,
    )  # fmt: skip
    check((reason is None) == bool(supported), f"with a gradient: {reason}")
    check(refusal_of(name, transpose_state_layout=True) is None, "the old name is refused")


@names
def test_arguments_that_do_not_fit(name):
    """FLA's function says what is wrong; the verifier only has to pass the call on."""
    arrays = inputs(name)
    check("beta" in refusal_of(name, arrays[:4]), "a missing argument")
    check("beta" in refusal_of(name, arrays, beta=arrays[4]), "an argument given twice")
    check(refusal_of(name, arrays + (None,) * 20) is not None, "too many arguments")
    check(refusal_of(name, arrays[:3], g=arrays[3], beta=arrays[4]) is None, "by keyword")


def test_intermediate_states_are_taken():
    check(refusal_of("chunk_kda", return_intermediate_states=True) is None, "refused")
    reason = refusal_of("chunk_kda", return_intermediate_states=True, chunk_size=32)
    check("64" in reason, f"chunks of 32: {reason}")


def test_recurrent_kda():
    """The function below FLA's fused_recurrent_kda, which 0.6 dispatches."""
    from pylinattn import _fla_backend

    backend = _fla_backend._backend_class(BaseBackend)()
    keywords = dict(zip(("q", "k", "v", "g", "beta"), inputs("chunk_kda")))
    keywords |= dict(use_qk_l2norm_in_kernel=True, output_final_state=True)
    name = "fused_recurrent_kda_fwd"
    accepted, reason = backend.verify(name, **keywords, inplace_final_state=False)
    check(accepted, f"refused: {reason}")
    got = backend.fused_recurrent_kda_fwd(**keywords, inplace_final_state=False)
    for mine, theirs in zip(got, ours.fused_recurrent_kda(**keywords)):
        check(torch.equal(mine, theirs), "another result")
    more = dict(inplace_final_state=False)
    for refused in (
        dict(),
        more | dict(out=keywords["v"]),
        more | dict(ssm_state_indices=torch.zeros(1, dtype=torch.int64)),
        more | dict(beta=keywords["v"]),
        more | dict(unknown=1),
    ):
        accepted, reason = backend.verify(name, **(keywords | refused))
        check(not accepted and reason, f"{list(refused)} is taken")


def test_without_fla(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(RuntimeError, match="flash-linear-attention"):
        ours.register_fla()


def test_the_real_fla():
    """The dispatch of an installed FLA picks us."""
    try:
        fla = importlib.import_module("fla.ops.gated_delta_rule")
        kda = importlib.import_module("fla.ops.kda")
    except Exception as error:  # Triton is not there, or has no driver
        pytest.skip(f"no FLA that can be imported: {type(error).__name__}: {error}")
    ours.register_fla()
    try:
        for module, name in ((fla, "chunk_gated_delta_rule"), (kda, "chunk_kda")):
            got = getattr(module, name)(*inputs(name), use_qk_l2norm_in_kernel=True)[0]
            want = getattr(ours, name)(*inputs(name), use_qk_l2norm_in_kernel=True)[0]
            check(torch.equal(got, want), f"{name} of FLA gives another result")
        if hasattr(importlib.import_module("fla.ops.kda.fused_recurrent"), "dispatch"):
            got = kda.fused_recurrent_kda(*inputs("chunk_kda"))[0]
            want = ours.fused_recurrent_kda(*inputs("chunk_kda"))[0]
            check(torch.equal(got, want), "fused_recurrent_kda of FLA gives another result")
    finally:
        ours.unregister_fla()
