// Affine maps of spans of tokens, S_out = M S_in + h, and their composition.
//
// A token maps S to (1 - beta k k^T) diag(exp(g)) S + beta k v^T. Forward, [h | M] is the recurrence itself started from
// [0 | 1] with values [v | 0]. Backward, with D' = D + scale q do^T, a token maps the gradient of the state after it to
// diag(exp(g)) (1 - beta k k^T) D', no state needed: [h | M] starts from [0 | 1] with do = [do | 0], and M comes out
// transposed.
//
// A task is one (sequence, value head); its columns are cut into blocks of h, then blocks of M.
#include "bwd.h"
#include "bwd_kernels.h"
#include "bwd_rows.h"
#include "schedule.h"

namespace linattn::cpu {
namespace {

template <class Real>
constexpr int64_t blocks_of(int64_t cols) {
    return (cols + kCols<Real> - 1) / kCols<Real>;
}

template <class Real>
struct SegmentRows {
    TokenRows<Real> tokens;
    Real *values, *u;  // [chunk][kCols]
    Real *states;      // [blocks][K][kCols]

    SegmentRows(Cutter &cut, int64_t K, int64_t chunk, int64_t channels, int64_t blocks)
        : tokens(cut, K, chunk, channels),
          values(cut.take<Real>(chunk * kCols<Real>)),
          u(cut.take<Real>(kCols<Real>)),
          states(cut.take<Real>(blocks * K * kCols<Real>)) {}
};

template <class Real>
class SegmentMap {
  public:
    explicit SegmentMap(const SegmentParams &p)
        : p_(p),
          kernel_(kernels<Real>(detect_isa())),
          bwd_(bwd_kernels<Real>(detect_isa())),
          chunk_(std::clamp<int64_t>(longest_sequence(p), 1, kChunk)),
          channels_(gate_channels(p)),
          value_blocks_(blocks_of<Real>(p.V)),
          blocks_(value_blocks_ + blocks_of<Real>(p.K)),
          schedule_(p.N, p.HV, 1, 1, 2.0 * p.B * p.T * p.HV * p.K * (p.V + p.K), 0),
          scratch_(part_bytes(), schedule_.workers) {}

    void run() const {
        parallel_for(schedule_.tasks(), schedule_.workers,
                     [this](int64_t task, int worker) { run_task(schedule_.sequence(task), schedule_.head(task), worker); });
    }

  private:
    using Rows = SegmentRows<Real>;

    int64_t part_bytes() const {
        Cutter cut(nullptr);
        Rows(cut, p_.K, chunk_, channels_, blocks_);
        return cut.bytes();
    }
    bool of_values(int64_t block) const { return block < value_blocks_; }
    int64_t first_col(int64_t block) const { return (of_values(block) ? block : block - value_blocks_) * kCols<Real>; }
    int64_t cols(int64_t block) const { return std::min(kCols<Real>, (of_values(block) ? p_.V : p_.K) - first_col(block)); }
    Real *state(const Rows &rows, int64_t block) const { return rows.states + block * p_.K * kCols<Real>; }

    void run_task(int64_t n, int64_t head, int worker) const {
        Cutter cut(scratch_.part(worker));
        const Rows rows(cut, p_.K, chunk_, channels_, blocks_);
        const GateOptions<Real> gate = gate_options(p_, head, rows.tokens.bias, channels_);
        const SequenceSpan span = span_of_sequence(p_, n);
        std::fill_n(rows.states, blocks_ * p_.K * kCols<Real>, Real(0));
        for (int64_t i = 0; i < p_.K; ++i) {
            const int64_t block = value_blocks_ + i / kCols<Real>;
            state(rows, block)[i * kCols<Real> + i % kCols<Real>] = 1;
        }
        const int64_t chunks = (span.length + chunk_ - 1) / chunk_;
        for (int64_t step = 0; step < chunks; ++step) {
            const int64_t first = (p_.backward ? chunks - 1 - step : step) * chunk_;
            const TokenRun run{span.b, span.first + first, std::min(chunk_, span.length - first), head};
            prepare_tokens(p_, kernel_, gate, run, rows.tokens);
            for (int64_t i = 0; i < run.size * p_.K; ++i) rows.tokens.q[i] *= static_cast<Real>(p_.scale);
            for (int64_t block = 0; block < blocks_; ++block) run_block(rows, run, block);
        }
        for (int64_t block = 0; block < blocks_; ++block)
            StateView<Real>(of_values(block) ? p_.added : p_.transition, n, head, first_col(block), p_.K, cols(block))
                .store(kernel_, state(rows, block), kCols<Real>);
    }

    void run_block(const Rows &rows, const TokenRun &run, int64_t block) const {
        const int64_t K = p_.K, C = kCols<Real>;
        if (!of_values(block) || cols(block) < C) std::fill_n(rows.values, run.size * C, Real(0));
        if (of_values(block))
            load_tokens(kernel_, rows.values, C, p_.backward ? p_.d_o : p_.v, run, run.head, first_col(block), cols(block));
        const TokenRows<Real> &x = rows.tokens;
        Real *const S = state(rows, block);
        for (int64_t step = 0; step < run.size; ++step) {
            const int64_t i = p_.backward ? run.size - 1 - step : step;
            if (p_.backward)
                bwd_.reverse_map(S, x.decay + i * K, x.k + i * K, x.q + i * K, rows.values + i * C, x.beta[i], K);
            else
                bwd_.forward(S, S, x.decay + i * K, x.k + i * K, rows.values + i * C, rows.u, x.beta[i], K);
        }
    }

    const SegmentParams &p_;
    const Kernels<Real> &kernel_;
    const BwdKernels<Real> &bwd_;
    const int64_t chunk_, channels_, value_blocks_, blocks_;
    const Schedule schedule_;
    const Scratch scratch_;
};

// A task is one (sequence, value head); block of columns by block, S goes through the segments.
template <class Real>
class Merge {
  public:
    explicit Merge(const MergeParams &p)
        : p_(p),
          kernel_(kernels<Real>(detect_isa())),
          bwd_(bwd_kernels<Real>(detect_isa())),
          schedule_(p.N, p.HV, 1, 1, double(p.R) * p.N * p.HV * p.K * p.K * p.V, 0),
          scratch_((p.K * p.K + 2 * p.K * kCols<Real>)*static_cast<int64_t>(sizeof(Real)) + 3 * 64, schedule_.workers) {}

    void run() const {
        parallel_for(schedule_.tasks(), schedule_.workers,
                     [this](int64_t task, int worker) { run_task(schedule_.sequence(task), schedule_.head(task), worker); });
    }

  private:
    void run_task(int64_t n, int64_t head, int worker) const {
        const int64_t K = p_.K;
        Cutter cut(scratch_.part(worker));
        Real *const M = cut.take<Real>(K * K);
        Real *S = cut.take<Real>(K * kCols<Real>), *next = cut.take<Real>(K * kCols<Real>);
        for (int64_t col = 0; col < p_.V; col += kCols<Real>) {
            const int64_t cols = std::min(kCols<Real>, p_.V - col);
            if (p_.initial_state)
                StateView<Real>(p_.initial_state, n, head, col, K, cols).load(kernel_, S);
            else
                std::fill_n(S, K * kCols<Real>, Real(0));
            for (int64_t step = 0; step < p_.R; ++step) {
                const int64_t r = p_.backward ? p_.R - 1 - step : step;
                view(p_.states, r, n, head, col, cols).store(kernel_, S, kCols<Real>);
                if (step + 1 == p_.R && !p_.final_state) break;
                kernel_.load(M, K, segment(p_.M, r, n, head), p_.M.dtype, p_.M.stride[3], p_.M.stride[4], K, K);
                view(p_.h, r, n, head, col, cols).load(kernel_, next);
                bwd_.multiply_add(next, M, S, K, K);
                std::swap(S, next);
            }
            if (p_.final_state) StateView<Real>(p_.final_state, n, head, col, K, cols).store(kernel_, S, kCols<Real>);
        }
    }

    static char *segment(const Tensor &x, int64_t r, int64_t n, int64_t head) { return element(x, r, n, head); }

    // One segment's [K, cols] of one sequence and head.
    StateView<Real> view(const Tensor &x, int64_t r, int64_t n, int64_t head, int64_t col, int64_t cols) const {
        StateView<Real> part;
        part.data = segment(x, r, n, head) + col * x.stride[4] * dtype_bytes(x.dtype);
        part.dtype = x.dtype;
        part.stride_k = x.stride[3], part.stride_v = x.stride[4];
        part.K = p_.K, part.cols = cols;
        return part;
    }

    const MergeParams &p_;
    const Kernels<Real> &kernel_;
    const BwdKernels<Real> &bwd_;
    const Schedule schedule_;
    const Scratch scratch_;
};

}  // namespace

template <class Real>
void run_segment(const SegmentParams &p) {
    SegmentMap<Real>(p).run();
}
template <class Real>
void run_merge(const MergeParams &p) {
    Merge<Real>(p).run();
}

template void run_segment<float>(const SegmentParams &);
template void run_segment<double>(const SegmentParams &);
template void run_merge<float>(const MergeParams &);
template void run_merge<double>(const MergeParams &);

}  // namespace linattn::cpu
