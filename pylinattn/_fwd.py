"""gdn_fwd and kda_fwd: whole sequences."""

from __future__ import annotations

from typing import NamedTuple

from ._call import Array, Call, Op
from ._exchange import Exchange, exchanges
from ._layout import NOT_GIVEN
from ._lib import BETA_FORMS, GATES, SAVES

_GDN_FWD, _KDA_FWD = Op("gdn_fwd"), Op("kda_fwd")

ZERO_CHECKPOINTS = 2  # of zero_tail


class _Outputs(NamedTuple):
    o: Array
    final_state: Array | None


class Forward(_Outputs):
    """``(o, final_state)`` whatever the options; what else they ask for comes as attributes."""

    checkpoints: Array | None = None
    saved: Array | None = None


def _outputs(
    exchange: Exchange, q: Array, v: Array, initial_state: Array | None, cu_seqlens: Array | None,
    read_indices: Array | None, write_indices: Array | None, o: Array | None,
    final_state: Array | None, checkpoints: Array | None, checkpoint_every: int,
    output_final_state: bool,
) -> Forward | None:  # fmt: skip
    """The outputs of a plain call, of which those not given are made; None if it is not plain."""
    if checkpoint_every != 0 or checkpoints is not None:
        return None
    if o is None:
        o = exchange.output(q, v)
        if o is None:
            return None
    if final_state is None and output_final_state:
        table = read_indices if write_indices is None else write_indices
        final_state = exchange.final_state(q, v, initial_state, cu_seqlens, table)
        if final_state is None:
            return None
    return Forward(o, final_state)


def _fwd(
    op: Op, q: Array, k: Array, v: Array, g: Array, beta: Array,
    initial_state: Array | None, cu_seqlens: Array | None, A_log: Array | None,
    dt_bias: Array | None, read_indices: Array | None, write_indices: Array | None, checkpoint_indices: Array | None,
    o: Array | None, final_state: Array | None, checkpoints: Array | None, saved: Array | None,
    workspace: Array | None, scale: float | None, lower_bound: float | None, qk_l2norm: bool,
    gate: str, beta_form: str, checkpoint_every: int, save: str, splits: int | str, checked: bool,
    output_final_state: bool,
) -> Forward:  # fmt: skip
    exchange = exchanges.get(type(q))
    if exchange is not None and not exchange.is_compiling():
        outputs = _outputs(
            exchange, q, v, initial_state, cu_seqlens, read_indices, write_indices, o, final_state,
            checkpoints, checkpoint_every, output_final_state,
        )  # fmt: skip
        arrays = (
            q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, read_indices, write_indices,
            checkpoint_indices, outputs and outputs.o, outputs and outputs.final_state, checkpoints,
            saved, workspace,
        )  # fmt: skip
        options = (
            scale, lower_bound, qk_l2norm, gate, beta_form, checkpoint_every,
            0 if save == "nothing" else None, 0 if splits == "auto" else None, bool(checked),
            o is None and cu_seqlens is not None,
        )  # fmt: skip
        given = () if o is final_state else [x for x in (o, final_state) if x is not None]
        if outputs is not None and exchange.run(op, arrays, given, *options):
            return outputs
    call = Call(op, q, "q")
    take = call.take
    tq, tk, tv = call.first, take(k, "k"), take(v, "v")
    t_initial = take(initial_state, "initial_state")
    t_cu = take(cu_seqlens, "cu_seqlens")
    every = call.integer("checkpoint_every", checkpoint_every)
    zero_tail = int(o is None and cu_seqlens is not None)

    # Of arrays of another rank no shape can be derived; the library refuses them below.
    if len(tk[1].shape) == len(tv[1].shape) == 4:
        B, T = tv[1].shape[:2]
        states_like = (tk[1], tv[1], t_initial[1])
        if o is None:
            o = call.make_like(v, tv[1])
        if final_state is None and output_final_state and write_indices is None:
            N = B if cu_seqlens is None else max(t_cu[1].shape[0] - 1, 0)
            # a row of padding is not written
            kind = "empty" if read_indices is None else "zeros"
            final_state = call.make_states(N, *states_like, kind)
        if checkpoints is None and every > 0 and checkpoint_indices is None:
            # Rows of padding are not written. Of packed sequences the library zeroes the rows that none has; without a
            # sequence it launches nothing.
            packed = cu_seqlens is not None
            whole = read_indices is None and not (packed and t_cu[1].shape == (1,))
            checkpoints = call.make_states(
                B * (T // every), *states_like, "empty" if whole else "zeros"
            )
            if packed and whole:
                zero_tail += ZERO_CHECKPOINTS

    save_code = call.choice("save", save, SAVES)
    fields = (
        *tq,
        *tk,
        *tv,
        *take(g, "g"),
        *take(beta, "beta"),
        *t_initial,
        *t_cu,
        *take(A_log, "A_log"),
        *take(dt_bias, "dt_bias"),
        *take(read_indices, "read_indices"),
        *take(write_indices, "write_indices"),
        *take(checkpoint_indices, "checkpoint_indices"),
        *take(o, "o", True),
        *take(final_state, "final_state", True),
        *take(checkpoints, "checkpoints", True),
    )
    t_workspace = take(workspace, "workspace", True)
    numbers = (
        call.scale(scale),
        0.0 if lower_bound is None else call.number("lower_bound", lower_bound),
        bool(qk_l2norm),
        call.choice("gate", gate, GATES),
        call.choice("beta_form", beta_form, BETA_FORMS),
        every,
        save_code,
        call.splits(splits),
        bool(checked),
        zero_tail,
        call.stream,
    )
    if saved is None and save_code:
        saved = call.make_saved(*fields, *NOT_GIVEN, *t_workspace, *numbers)
    call.run(workspace, *fields, *take(saved, "saved", True), *t_workspace, *numbers)
    outputs = Forward(call.result(o), call.result(final_state))
    if checkpoints is not None:
        outputs.checkpoints = call.result(checkpoints)
    if saved is not None:
        outputs.saved = call.result(saved)
    return outputs


def gdn_fwd(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    read_indices: Array | None = None,
    write_indices: Array | None = None,
    checkpoint_indices: Array | None = None,
    o: Array | None = None,
    final_state: Array | None = None,
    checkpoints: Array | None = None,
    saved: Array | None = None,
    workspace: Array | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
    checkpoint_every: int = 0,
    save: str = "nothing",
    splits: int | str = "auto",
    checked: bool = False,
    output_final_state: bool = False,
) -> Forward:
    """Gated delta rule over whole sequences, prefill and training forward:

    S = exp(g) S;  u = beta (v - S'k);  S = S + k u';  o = scale S'q.

    Args:
        q: ``[B,T,H,K]`` bf16|f16|f32|f64. Queries, of norm <= 1 unless qk_l2norm.
        k: ``[B,T,H,K]`` dtype of q. Keys, of norm <= 1 unless qk_l2norm.
        v: ``[B,T,HV,V]`` dtype of q. Values.
        g: ``[B,T,HV]`` f32|bf16|f16|f64. Log decay per token, <= 0, or raw gate input.
        beta: ``[B,T,HV]`` f32|bf16|f16|f64. Write strength, or its logits.
        initial_state: ``[P,HV,K,V]`` f32|bf16|f64, optional. State before token 0, zeros if None; a
            pool with read_indices.
        cu_seqlens: ``[N+1]`` i32|i64, optional. Where each packed sequence starts, and the end; B
            is 1.
        A_log: ``[HV]`` f32|bf16|f64, optional. Log of the gate's amplitude; for gate "softplus" or
            "bounded".
        dt_bias: ``[HV]`` f32|bf16|f64, optional. Added to the raw gate input; for gate "softplus"
            or "bounded".
        read_indices: ``[N]`` i32|i64, optional. Row of initial_state per sequence; -1 is padding.
        write_indices: ``[N]`` i32|i64, optional. Row of final_state per sequence, -1 writes
            nothing; if None, read_indices if final_state is initial_state itself, else row n.
        checkpoint_indices: ``[N,M]`` i32|i64, optional. Row of checkpoints for the m-th checkpoint
            of a sequence, -1 skips it; if None, rows in order, sequence after sequence.
        o: ``[B,T,HV,V]`` dtype of q. Outputs; allocated if None.
        final_state: ``[F,HV,K,V]`` f32|bf16|f64, optional. State after the last token; may be
            initial_state itself; if None, output_final_state decides; write_indices needs it.
        checkpoints: ``[C,HV,K,V]`` f32|bf16|f64, optional. State after every checkpoint_every
            tokens of each sequence; rows past C are dropped; allocated if None;
            checkpoint_indices needs it.
        saved: ``[S]`` u8, optional. What the backward reads, for save "states"; allocated if None.
        workspace: ``[W]`` u8, optional. Scratch; allocated if None.
        scale: float. Multiplies q, not 0; ``K**-0.5`` if None.
        lower_bound: float, < 0. Lower bound of the log decay, for gate "bounded" alone.
        qk_l2norm: bool. Divide q and k by ``sqrt(sum x^2 + 1e-6)`` first.
        gate: "none": g is the log decay. "softplus": it is ``-exp(A_log) softplus(g + dt_bias)``.
            "bounded": it is ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``, with 1 for
            ``exp(A_log)`` if A_log is None.
        beta_form: "weight": beta is the write strength, in [0,2]. "logits": it is
            ``sigmoid(beta)``. "logits_x2": it is ``2 sigmoid(beta)``.
        checkpoint_every: int. A multiple of 64, or 0 for no checkpoints.
        save: "nothing", or "states": saved is filled, which gdn_bwd of the same arguments reads, so
            that both together are faster. On a GPU that is ``2 K V / 64 + 2 V + 309`` bytes for
            each token and value head and ``4 K`` for each of H, 1077 and 512 at K = V = 128, and the
            last bits of outputs may depend on later tokens of the sequence. Not with read_indices,
            write_indices, checkpoints or a final_state that is initial_state.
        splits: "auto" or int. Pieces per sequence inside the card; 1 is none, and a sequence then has
            the same bits packed and alone.
        checked: bool. Synchronise and test values too (lengths, indices, g <= 0).
        output_final_state: bool. Allocate final_state if it is None.
    Returns:
        ``(o, final_state)``, a tuple with the further attributes ``checkpoints`` and ``saved``.
        final_state is None unless it is given or asked for. Arrays made here are of the library and
        on the device of q. A final_state made here has N rows, with the dtype and stride order of
        initial_state, or else float32 (float64 for float64 q) and K-first; checkpoints likewise.
        Checkpoints made here have ``T // checkpoint_every`` rows for each row of B; with cu_seqlens
        that is enough for any lengths, and the rows past the last checkpoint are zero.
    Raises:
        ValueError: shape, stride, range or option.  TypeError: dtype or device.
        NotImplementedError: no kernel for this call.  RuntimeError: CUDA failure.
    Source: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464.
    """
    return _fwd(
        _GDN_FWD, q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, read_indices,
        write_indices, checkpoint_indices, o, final_state, checkpoints, saved, workspace, scale,
        lower_bound, qk_l2norm, gate, beta_form, checkpoint_every, save, splits, checked,
        output_final_state,
    )  # fmt: skip


def kda_fwd(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    read_indices: Array | None = None,
    write_indices: Array | None = None,
    checkpoint_indices: Array | None = None,
    o: Array | None = None,
    final_state: Array | None = None,
    checkpoints: Array | None = None,
    saved: Array | None = None,
    workspace: Array | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
    checkpoint_every: int = 0,
    save: str = "nothing",
    splits: int | str = "auto",
    checked: bool = False,
    output_final_state: bool = False,
) -> Forward:
    """Kimi delta attention over whole sequences: as gdn_fwd, with one decay per key channel.

    Args:
        q: ``[B,T,H,K]`` bf16|f16|f32|f64. Queries, of norm <= 1 unless qk_l2norm.
        k: ``[B,T,H,K]`` dtype of q. Keys, of norm <= 1 unless qk_l2norm.
        v: ``[B,T,HV,V]`` dtype of q. Values.
        g: ``[B,T,HV,K]`` f32|bf16|f16|f64. Log decay per token and key channel, <= 0, or raw gate
            input.
        beta: ``[B,T,HV]`` f32|bf16|f16|f64. Write strength, or its logits.
        initial_state: ``[P,HV,K,V]`` f32|bf16|f64, optional. State before token 0, zeros if None; a
            pool with read_indices.
        cu_seqlens: ``[N+1]`` i32|i64, optional. Where each packed sequence starts, and the end; B
            is 1.
        A_log: ``[HV]`` f32|bf16|f64, optional. Log of the gate's amplitude; for gate "softplus" or
            "bounded".
        dt_bias: ``[HV,K]`` f32|bf16|f64, optional. Added to the raw gate input; for gate "softplus"
            or "bounded".
        read_indices: ``[N]`` i32|i64, optional. Row of initial_state per sequence; -1 is padding.
        write_indices: ``[N]`` i32|i64, optional. Row of final_state per sequence, -1 writes
            nothing; if None, read_indices if final_state is initial_state itself, else row n.
        checkpoint_indices: ``[N,M]`` i32|i64, optional. Row of checkpoints for the m-th checkpoint
            of a sequence, -1 skips it; if None, rows in order, sequence after sequence.
        o: ``[B,T,HV,V]`` dtype of q. Outputs; allocated if None.
        final_state: ``[F,HV,K,V]`` f32|bf16|f64, optional. State after the last token; may be
            initial_state itself; if None, output_final_state decides; write_indices needs it.
        checkpoints: ``[C,HV,K,V]`` f32|bf16|f64, optional. State after every checkpoint_every
            tokens of each sequence; rows past C are dropped; allocated if None;
            checkpoint_indices needs it.
        saved: ``[S]`` u8, optional. What the backward reads, for save "states"; allocated if None.
        workspace: ``[W]`` u8, optional. Scratch; allocated if None.
        scale: float. Multiplies q, not 0; ``K**-0.5`` if None.
        lower_bound: float, < 0. Lower bound of the log decay, for gate "bounded" alone.
        qk_l2norm: bool. Divide q and k by ``sqrt(sum x^2 + 1e-6)`` first.
        gate: "none": g is the log decay. "softplus": it is ``-exp(A_log) softplus(g + dt_bias)``.
            "bounded": it is ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``, with 1 for
            ``exp(A_log)`` if A_log is None.
        beta_form: "weight": beta is the write strength, in [0,2]. "logits": it is
            ``sigmoid(beta)``. "logits_x2": it is ``2 sigmoid(beta)``.
        checkpoint_every: int. A multiple of 64, or 0 for no checkpoints.
        save: "nothing", or "states" (on the CPU alone): saved is filled, which kda_bwd of the same
            arguments reads. Not with read_indices, write_indices, checkpoints or a final_state that
            is initial_state.
        splits: "auto" or int. Pieces per sequence inside the card; 1 is none, and a sequence then has
            the same bits packed and alone.
        checked: bool. Synchronise and test values too (lengths, indices, g <= 0).
        output_final_state: bool. Allocate final_state if it is None.
    Returns:
        ``(o, final_state)``, a tuple with the further attributes ``checkpoints`` and ``saved``.
        final_state is None unless it is given or asked for. Arrays made here are of the library and
        on the device of q. A final_state made here has N rows, with the dtype and stride order of
        initial_state, or else float32 (float64 for float64 q) and K-first; checkpoints likewise.
        Checkpoints made here have ``T // checkpoint_every`` rows for each row of B; with cu_seqlens
        that is enough for any lengths, and the rows past the last checkpoint are zero.
    Raises:
        ValueError: shape, stride, range or option.  TypeError: dtype or device.
        NotImplementedError: no kernel for this call.  RuntimeError: CUDA failure.
    Source: Kimi Team 2025, arXiv:2510.26692.
    """
    return _fwd(
        _KDA_FWD, q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, read_indices,
        write_indices, checkpoint_indices, o, final_state, checkpoints, saved, workspace, scale,
        lower_bound, qk_l2norm, gate, beta_form, checkpoint_every, save, splits, checked,
        output_final_state,
    )  # fmt: skip
