// The recurrence of gdn and kda, fwd, decode and verify, token by token (arXiv:2412.06464, arXiv:2510.26692):
//
//   S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = scale S^T q
//
// Both products with S are taken before the update, so that a token needs one pass over the state. With d = exp(g):
//
//   y = S^T (d k);   z = S^T (d q);   u = beta (v - y);   o = scale (z + (q.k) u);   S = d S + k u^T
//
// and that pass yields y and z of the token that follows. gdn_fwd leaves the decay, one number per token, out of the pass, where
// it would be the fourth operation beside three: S is kept as S / fade, fade being the product of the decays since S was last
// written as it is, which is done before fade gets too small:
//
//   fade = d fade;   y = fade S^T k;   z = fade S^T q;   u = beta (v - y);   o = scale (z + (q.k) u);   S = S + k (u / fade)^T
//
// (Not for decode, verify and commit, which agree in bits.) A task is one (sequence, value head), or a group of its column
// blocks, which never meet. It takes up to kChunk tokens at a time:
//   prepare    q, k, d, d k, d q, beta, q.k of each token, converted, normalised and activated
//   run_block  for each block of columns, in the first cache: the tokens one by one, then o
// The state stays in float (double for fp64) from the first token to the last, in scratch; the first pass reads and the last
// one writes the caller's memory itself where its layout allows.
#include <cmath>
#include <vector>

#include "delta.h"
#include "rows.h"
#include "schedule.h"

namespace linattn::cpu {
namespace {

// Tokens of one sequence: rows [first, first + length) of batch entry b.
struct Sequence {
    int64_t n = 0, b = 0, first = 0, length = 0;
};

Sequence sequence_of(const DeltaParams &p, int64_t n) {
    if (!p.cu_seqlens) return {n, n, 0, p.T};
    const int64_t first = std::clamp<int64_t>(index_at(p.cu_seqlens, n), 0, p.T);
    const int64_t end = std::clamp<int64_t>(index_at(p.cu_seqlens, n + 1), first, p.T);
    return {n, 0, first, end - first};
}

int64_t longest(const DeltaParams &p) {
    int64_t most = 0;
    for (int64_t n = 0; n < p.N; ++n) most = std::max(most, sequence_of(p, n).length);
    return most;
}

// Row of checkpoints at which each packed sequence begins; empty where it needs no table.
std::vector<int64_t> checkpoint_starts(const DeltaParams &p) {
    std::vector<int64_t> starts;
    if (!p.checkpoints || p.checkpoint_every < 1 || p.checkpoint_indices) return starts;
    starts.reserve(p.N);
    for (int64_t n = 0, row = 0; n < p.N; ++n) {
        starts.push_back(row);
        row += sequence_of(p, n).length / p.checkpoint_every;
    }
    return starts;
}

template <class Real>
class Delta {
  public:
    explicit Delta(const DeltaParams &p)
        : p_(p),
          kernel_(kernels<Real>(detect_isa())),
          tree_(p.op == Op::Verify && p.parents),
          lazy_(p.op == Op::Fwd && p.family == Family::Gdn),
          schedule_(p.N, p.HV, p.V, kCols<Real>, double(p.B) * p.T * p.HV * p.K * p.V,
                    double(p.N) * p.HV * p.K * p.V *
                        (dtype_bytes(p.state_in.dtype) + (p.op == Op::Verify ? 0 : dtype_bytes(p.state_out.dtype)))),
          chunk_(std::clamp<int64_t>(longest(p), 1, kChunk)),
          slots_(tree_                 ? p.T + 1
                 : longest(p) > kChunk ? schedule_.blocks_per_group()
                                       : 1),
          checkpoint_starts_(checkpoint_starts(p)),
          scratch_(part_bytes(), schedule_.workers) {}

    void run() const {
        parallel_for(schedule_.tasks(), schedule_.workers, [this](int64_t task, int worker) {
            Cutter cut(scratch_.part(worker));
            run_task(task, DeltaRows<Real>(cut, p_.K, chunk_, slots_));
        });
        if (p_.zero_tail && p_.cu_seqlens) zero_tail();
        if (p_.zero_checkpoints) zero_checkpoints();
    }

  private:
    using Rows = DeltaRows<Real>;

    int64_t part_bytes() const {
        Cutter cut(nullptr);
        Rows(cut, p_.K, chunk_, slots_);
        return cut.bytes();
    }

    void run_task(int64_t task, const Rows &rows) const {
        const Sequence sequence = sequence_of(p_, schedule_.sequence(task));
        const int64_t head = schedule_.head(task), n = sequence.n;
        const int64_t first_block = schedule_.first_block(task), end_block = schedule_.end_block(task);
        const int64_t read = p_.state_in       ? pool_row(p_.read_indices, n, p_.P)
                             : p_.read_indices ? index_at(p_.read_indices, n)
                                               : n;
        if (first_block == end_block) return;
        std::fill_n(rows.zeros, std::max(p_.K, kCols<Real>), Real(0));
        if (read < 0) return zero_outputs(sequence, head, first_block, end_block, rows);
        const int64_t write = p_.state_out && p_.op != Op::Verify ? pool_row(p_.write_indices, n, p_.F) : -1;
        if (sequence.length == 0) {
            if (write >= 0)
                copy_state(kernels<double>(Isa::Baseline), p_.state_in, read, p_.state_out, write, head,
                           first_block * kCols<Real>, std::min(end_block * kCols<Real>, p_.V), p_.K,
                           reinterpret_cast<double *>(rows.states));
            return;
        }
        const GateOptions<Real> gate = gate_options<Real>(p_, head, rows.bias, p_.family == Family::Kda ? p_.K : chunk_);
        Real fade = 1;
        for (int64_t t = 0; t < sequence.length;) {
            const int64_t until_checkpoint = p_.checkpoint_every > 0 ? p_.checkpoint_every - t % p_.checkpoint_every : chunk_;
            const int64_t size = std::min({chunk_, sequence.length - t, until_checkpoint});
            const int64_t checkpoint = checkpoint_row(sequence, t + size);
            prepare_rows(p_, kernel_, gate, {sequence.b, sequence.first + t, size, head}, first_block == 0, lazy_, rows);
            if (lazy_) plan_fades(rows, size, checkpoint >= 0 || (t + size == sequence.length && write >= 0), fade);
            for (int64_t block = first_block; block < end_block; ++block) {
                const int64_t col = block * kCols<Real>, cols = std::min(kCols<Real>, p_.V - col);
                Real *slot = rows.states + (slots_ > 1 && !tree_ ? block - first_block : 0) * p_.K * kCols<Real>;
                Block at{sequence, head, t, size, col, cols, slot, {}, {}, {}};
                if (t == 0 && p_.state_in) at.initial = StateView<Real>(p_.state_in, read, head, col, p_.K, cols);
                if (t + size == sequence.length && write >= 0)
                    at.final = StateView<Real>(p_.state_out, write, head, col, p_.K, cols);
                if (checkpoint >= 0) at.checkpoint = StateView<Real>(p_.checkpoints, checkpoint, head, col, p_.K, cols);
                tree_ ? run_tree(at, rows) : run_chain(at, rows);
            }
            t += size;
        }
    }

    // Fills fade of each token, with its own decay, and renews: the state after it is written as it is, and fade starts from 1.
    void plan_fades(const Rows &rows, int64_t size, bool renew_last, Real &fade) const {
        constexpr Real kLeast = Real(1) / 65536;  // not less, so that u / fade stays in range with u near the largest float
        for (int64_t i = 0; i < size; ++i) {
            rows.fade[i] = fade *= rows.gates[i];
            rows.renews[i] = fade < kLeast || (renew_last && i + 1 == size);
            if (!rows.renews[i]) continue;
            std::fill_n(rows.decay + i * p_.K, p_.K, fade);
            fade = 1;
        }
    }

    // Row of checkpoints for the state after `tokens` tokens; -1 where none is due.
    int64_t checkpoint_row(const Sequence &sequence, int64_t tokens) const {
        if (!p_.checkpoints || p_.checkpoint_every < 1 || tokens % p_.checkpoint_every) return -1;
        const int64_t m = tokens / p_.checkpoint_every - 1;
        if (!p_.checkpoint_indices) return clamp_row(checkpoint_starts_[sequence.n] + m, p_.C);
        return m < p_.M ? clamp_row(index_at(p_.checkpoint_indices, sequence.n, m), p_.C) : -1;
    }

    // A run of tokens for one block of columns. `initial` is set in a sequence's first chunk, `final` in its last one.
    struct Block {
        const Sequence &sequence;
        int64_t head, t, size, col, cols;
        Real *slot;  // [K][kCols], where the state is kept from chunk to chunk; for a tree one per token, and one before
        StateView<Real> initial, final, checkpoint;
    };
    struct State {
        const Real *at;
        int64_t ld;
    };

    // The state before the block's first token.
    State open(const Block &at, Real *slot) const {
        if (at.t > 0) return {slot, kCols<Real>};
        if (!at.initial)
            std::fill_n(slot, p_.K * kCols<Real>, Real(0));
        else if (at.initial.direct())
            return {at.initial.at(), at.initial.stride_k};
        else
            at.initial.load(kernel_, slot);
        return {slot, kCols<Real>};
    }

    const Real *decayed_k(const Rows &rows, int64_t i) const { return (lazy_ ? rows.k : rows.decayed_k) + i * p_.K; }

    void dots(const Rows &rows, State S, int64_t i) const {
        kernel_.dots(S.at, S.ld, decayed_k(rows, i), rows.decayed_q + i * p_.K, rows.y, rows.z, p_.K);
    }
    // u and o of token i from y and z.
    void emit(const Rows &rows, int64_t i) const {
        constexpr int64_t ld = kCols<Real>;
        kernel_.emit(rows.u + i * ld, rows.o + i * ld, rows.u + i * ld, rows.y, rows.z, rows.beta[i], rows.qk[i],
                     static_cast<Real>(p_.scale), lazy_ ? rows.fade[i] : Real(1),
                     lazy_ && !rows.renews[i] ? 1 / rows.fade[i] : Real(1));
    }
    // The state after token i, and y and z of token i + 1 if that follows it.
    void advance(const Rows &rows, State S, Real *S_out, int64_t ld_out, int64_t i, bool follows) const {
        const int64_t K = p_.K;
        const Real *k = rows.k + i * K, *u = rows.u + i * kCols<Real>;
        const Real *next_k = follows ? decayed_k(rows, i + 1) : rows.zeros;
        const Real *next_q = follows ? rows.decayed_q + (i + 1) * K : rows.zeros;
        if (lazy_ && !rows.renews[i])
            kernel_.grow(S.at, S.ld, S_out, ld_out, k, u, next_k, next_q, rows.y, rows.z, K);
        else
            kernel_.advance(S.at, S.ld, S_out, ld_out, rows.decay + i * K, k, u, next_k, next_q, rows.y, rows.z, K);
    }

    void run_chain(const Block &at, const Rows &rows) const {
        load_v(at, rows);
        State S = open(at, at.slot);
        dots(rows, S, 0);
        for (int64_t i = 0; i < at.size; ++i) {
            emit(rows, i);
            const bool last = i + 1 == at.size, ends = at.t + at.size == at.sequence.length;
            const StateView<Real> kept = verified_state(at, i);
            if (last && ends && !at.final && !at.checkpoint && !kept) break;
            const bool in_place = last && at.final && at.final.direct();
            const State next{in_place ? at.final.at() : at.slot, in_place ? at.final.stride_k : kCols<Real>};
            advance(rows, S, const_cast<Real *>(next.at), next.ld, i, !last);
            S = next;
            if (kept) kept.store(kernel_, S.at, S.ld);
        }
        if (at.checkpoint) at.checkpoint.store(kernel_, S.at, S.ld);
        if (at.final && !at.final.direct()) at.final.store(kernel_, S.at, S.ld);
        store_o(at, rows);
    }

    // Token i starts from the state after its parent. Slot i + 1 holds the state after token i, slot 0 the one before all.
    void run_tree(const Block &at, const Rows &rows) const {
        const auto parent = [&](int64_t i) {
            const int64_t row = index_at(p_.parents, at.sequence.n, i);
            return row < i ? clamp_row(row, i) : -1;
        };
        bool has_child[kMaxVerifyTokens] = {};
        for (int64_t i = 0; i < at.size; ++i)
            if (const int64_t row = parent(i); row >= 0) has_child[row] = true;
        const auto slot = [&](int64_t i) { return at.slot + (i + 1) * p_.K * kCols<Real>; };
        load_v(at, rows);
        const State before = open(at, at.slot);
        bool ready = false;
        for (int64_t i = 0; i < at.size; ++i) {
            const int64_t row = parent(i);
            const State S = row < 0 ? before : State{slot(row), kCols<Real>};
            if (!ready) dots(rows, S, i);
            emit(rows, i);
            ready = i + 1 < at.size && parent(i + 1) == i;
            const StateView<Real> kept = verified_state(at, i);
            if (has_child[i] || kept) advance(rows, S, slot(i), kCols<Real>, i, ready);
            if (kept) kept.store(kernel_, slot(i), kCols<Real>);
        }
        store_o(at, rows);
    }

    // Where verify is to write the state after token i of the block; nothing for the other ops.
    StateView<Real> verified_state(const Block &at, int64_t i) const {
        if (p_.op != Op::Verify || !p_.write_indices || !p_.state_out) return {};
        const int64_t row = clamp_row(index_at(p_.write_indices, at.sequence.n, at.t + i), p_.F);
        return row < 0 ? StateView<Real>() : StateView<Real>(p_.state_out, row, at.head, at.col, p_.K, at.cols);
    }

    void load_v(const Block &at, const Rows &rows) const {
        if (at.cols < kCols<Real>) std::fill_n(rows.u, at.size * kCols<Real>, Real(0));
        kernel_.load(rows.u, kCols<Real>, element(p_.v, at.sequence.b, at.sequence.first + at.t, at.head, at.col), p_.v.dtype,
                     p_.v.stride[1], p_.v.stride[3], at.size, at.cols);
    }

    void store_o(const Block &at, const Rows &rows) const {
        const int64_t b = at.sequence.b, t = at.sequence.first + at.t;
        store_columns(p_.o, b, t, at.head, at.col, rows.o, kCols<Real>, at.size, at.cols);
        if (p_.kept_u) store_columns(p_.kept_u, b, t, at.head, at.col, rows.u, kCols<Real>, at.size, at.cols);
    }

    // x[b, t + i, head, col + c] = from[i][c]
    void store_columns(const Tensor &x, int64_t b, int64_t t, int64_t head, int64_t col, const Real *from, int64_t ld,
                       int64_t size, int64_t cols) const {
        kernel_.store(element(x, b, t, head, col), x.dtype, x.stride[1], x.stride[3], from, ld, size, cols);
    }

    // A padding sequence: o is 0, and what verify keeps is 0, too.
    void zero_outputs(const Sequence &sequence, int64_t head, int64_t first_block, int64_t end_block, const Rows &rows) const {
        const int64_t b = sequence.b, t = sequence.first, length = sequence.length, r = p_.HV / p_.H;
        for (int64_t block = first_block; block < end_block; ++block) {
            const int64_t col = block * kCols<Real>, cols = std::min(kCols<Real>, p_.V - col);
            store_columns(p_.o, b, t, head, col, rows.zeros, 0, length, cols);
            if (p_.kept_u) store_columns(p_.kept_u, b, t, head, col, rows.zeros, 0, length, cols);
        }
        if (first_block > 0) return;
        if (p_.kept_k && head % r == 0) store_columns(p_.kept_k, b, t, head / r, 0, rows.zeros, 0, length, p_.K);
        if (p_.kept_g) store_columns(p_.kept_g, b, t, head, 0, rows.zeros, 0, length, p_.family == Family::Kda ? p_.K : 1);
    }

    // Rows of o past the last sequence.
    void zero_tail() const {
        const int64_t first = std::clamp<int64_t>(index_at(p_.cu_seqlens, p_.N), 0, p_.T);
        const Real zeros[kMaxHead] = {};
        for (int64_t head = 0; head < p_.HV && first < p_.T; ++head)
            store_columns(p_.o, 0, first, head, 0, zeros, 0, p_.T - first, p_.V);
    }

    // Rows of checkpoints past the last sequence's.
    void zero_checkpoints() const {
        const int64_t last = p_.N - 1, bytes = dtype_bytes(p_.checkpoints.dtype);
        const int64_t rows = last < 0 ? 0 : checkpoint_starts_[last] + sequence_of(p_, last).length / p_.checkpoint_every;
        for (int64_t row = rows; row < p_.C; ++row)
            for (int64_t head = 0; head < p_.HV; ++head)
                for (int64_t k = 0; k < p_.K; ++k)
                    for (int64_t v = 0; v < p_.V; ++v) std::memset(element(p_.checkpoints, row, head, k, v), 0, bytes);
    }

    const DeltaParams &p_;
    const Kernels<Real> &kernel_;
    const bool tree_, lazy_;
    const Schedule schedule_;
    const int64_t chunk_, slots_;
    const std::vector<int64_t> checkpoint_starts_;
    const Scratch scratch_;
};

}  // namespace

template <class Real>
void run_delta(const DeltaParams &p) {
    Delta<Real>(p).run();
}

template void run_delta<float>(const DeltaParams &);
template void run_delta<double>(const DeltaParams &);

}  // namespace linattn::cpu
