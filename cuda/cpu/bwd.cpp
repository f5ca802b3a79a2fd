// Gradients of gdn and kda over whole sequences, token by token from the last to the first (arXiv:2412.06464,
// arXiv:2510.26692). With D the gradient of the state after a token, P = exp(g) S_before, e = v - P^T k, u = beta e:
//
//   D += scale q do^T;   dq = scale S do;   du = D^T k;   dbeta = du . e;   dv = beta du;   dk = D u - P dv
//   dP = D - k dv^T;     dg = rowsum(P o dP);   D = exp(g) dP, the gradient of the state before
//
// A full reset, exp(-inf) = 0, gives P = 0, so that its dg is 0 and nothing before it has a gradient.
//
// A task is one (sequence, key head) with its value heads in order, whose shares of dq and dk are added up in scratch; no
// result depends on the number of threads. For each value head:
//   forward   the state at every kChunk-th token, from the inputs, or as the forward op saved them
//   reverse   per chunk, last to first, and per block of columns: the states after each token again, then the steps above
// A thread's scratch is 2 K (longest sequence) + K V (1 + longest / kChunk) + K kCols kChunk elements, and some rows.
// Gradients of A_log and dt_bias are summed in double per sequence, then over the sequences in order.
#include "bwd.h"

#include <vector>

#include "bwd_kernels.h"
#include "bwd_rows.h"
#include "schedule.h"

namespace linattn::cpu {
namespace {

template <class Real>
struct BwdRows {
    TokenRows<Real> tokens;
    Real *raw;               // [chunk][max(channels, 1)], g or beta as given
    Real *e, *u, *d_o, *dv;  // [chunk][kCols]
    Real *dg, *dg_channels;  // [chunk][channels], [chunk][K]
    Real *dbeta;             // [chunk]
    Real *states;            // [chunk][K][kCols], after each token
    Real *D;                 // [blocks][K][kCols]
    Real *marks;             // [chunks + 1][blocks][K][kCols], at the start of each chunk
    Real *x;                 // [chunk][K]
    Real *dq, *dk;           // [longest][K]

    BwdRows(Cutter &cut, int64_t K, int64_t chunk, int64_t channels, int64_t blocks, int64_t longest)
        : tokens(cut, K, chunk, channels),
          raw(cut.take<Real>(chunk * channels)),
          e(cut.take<Real>(chunk * kCols<Real>)),
          u(cut.take<Real>(chunk * kCols<Real>)),
          d_o(cut.take<Real>(chunk * kCols<Real>)),
          dv(cut.take<Real>(chunk * kCols<Real>)),
          dg(cut.take<Real>(chunk * channels)),
          dg_channels(cut.take<Real>(chunk * K)),
          dbeta(cut.take<Real>(chunk)),
          states(cut.take<Real>(chunk * K * kCols<Real>)),
          D(cut.take<Real>(blocks * K * kCols<Real>)),
          marks(cut.take<Real>(((longest + chunk - 1) / chunk + 1) * blocks * K * kCols<Real>)),
          x(cut.take<Real>(chunk * K)),
          dq(cut.take<Real>(longest * K)),
          dk(cut.take<Real>(longest * K)) {}
};

template <class Real>
class Backward {
  public:
    explicit Backward(const BwdParams &p)
        : p_(p),
          kernel_(kernels<Real>(detect_isa())),
          bwd_(bwd_kernels<Real>(detect_isa())),
          longest_(longest_sequence(p)),
          chunk_(std::clamp<int64_t>(longest_, 1, kChunk)),
          channels_(gate_channels(p)),
          schedule_(p.N, p.H, 1, 1, 6.0 * p.B * p.T * p.HV * p.K * p.V, 0),
          blocks_((p.V + kCols<Real> - 1) / kCols<Real>),
          dA_log_(p.A_log ? p.N * p.HV : 0),
          ddt_bias_(p.gate == Gate::None ? 0 : p.N * p.HV * channels_),
          saved_(saved_states(p)),
          saved_starts_(p.saved ? p.N : 0),
          scratch_(part_bytes(), schedule_.workers) {
        int64_t row = 0;
        for (size_t n = 0; n < saved_starts_.size(); ++n) {
            saved_starts_[n] = row;
            row += span_of_sequence(p, static_cast<int64_t>(n)).length / kChunk;
        }
    }

    void run() {
        parallel_for(schedule_.tasks(), schedule_.workers,
                     [this](int64_t task, int worker) { run_task(schedule_.sequence(task), schedule_.head(task), worker); });
        // [HV] and [HV][channels], over the sequences in order.
        if (p_.dA_log) store_sums(p_.dA_log, dA_log_, 1);
        if (p_.ddt_bias) store_sums(p_.ddt_bias, ddt_bias_, channels_);
    }

  private:
    using Rows = BwdRows<Real>;

    int64_t part_bytes() const {
        Cutter cut(nullptr);
        Rows(cut, p_.K, chunk_, channels_, blocks_, longest_);
        return cut.bytes();
    }

    int64_t block_elems() const { return p_.K * kCols<Real>; }
    Real *mark(const Rows &rows, int64_t chunk, int64_t block) const {
        return rows.marks + (chunk * blocks_ + block) * block_elems();
    }
    int64_t cols_of(int64_t block) const { return std::min(kCols<Real>, p_.V - block * kCols<Real>); }

    void run_task(int64_t n, int64_t k_head, int worker) {
        Cutter cut(scratch_.part(worker));
        const Rows rows(cut, p_.K, chunk_, channels_, blocks_, longest_);
        const SequenceSpan span = span_of_sequence(p_, n);
        const int64_t group = p_.HV / p_.H;
        std::fill_n(rows.dq, span.length * p_.K, Real(0));
        std::fill_n(rows.dk, span.length * p_.K, Real(0));
        for (int64_t head = k_head * group; head < (k_head + 1) * group; ++head) run_head(rows, span, n, head);
        for (int64_t t = 0; t < span.length; t += chunk_) {
            const TokenRun run{span.b, span.first + t, std::min(chunk_, span.length - t), 0};
            finish_keys(rows, run, k_head, p_.q, rows.dq + t * p_.K, p_.dq);
            finish_keys(rows, run, k_head, p_.k, rows.dk + t * p_.K, p_.dk);
        }
    }

    void run_head(const Rows &rows, const SequenceSpan &span, int64_t n, int64_t head) {
        const GateOptions<Real> gate = gate_options(p_, head, rows.tokens.bias, channels_);
        const int64_t chunks = (span.length + chunk_ - 1) / chunk_;
        const auto run_of = [&](int64_t chunk) {
            return TokenRun{span.b, span.first + chunk * chunk_, std::min(chunk_, span.length - chunk * chunk_), head};
        };
        for (int64_t block = 0; block < blocks_; ++block) {
            load_state(p_.state_in, n, head, block, mark(rows, 0, block));
            load_state(p_.d_final_state, n, head, block, rows.D + block * block_elems());
        }
        for (int64_t chunk = 0; chunk + 1 < chunks; ++chunk) {
            if (!p_.saved) prepare_tokens(p_, kernel_, gate, run_of(chunk), rows.tokens);
            for (int64_t block = 0; block < blocks_; ++block)
                if (p_.saved)
                    load_state(saved_, saved_starts_[n] + chunk, head, block, mark(rows, chunk + 1, block));
                else
                    mark_next(rows, run_of(chunk), chunk, block);
        }
        for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
            const TokenRun run = run_of(chunk);
            prepare_tokens(p_, kernel_, gate, run, rows.tokens);
            std::fill_n(rows.dg_channels, run.size * p_.K, Real(0));
            std::fill_n(rows.dbeta, run.size, Real(0));
            for (int64_t block = 0; block < blocks_; ++block)
                reverse_chunk(rows, run, mark(rows, chunk, block), block, chunk * chunk_);
            finish_gates(rows, run, gate, n);
        }
        if (!p_.d_initial_state) return;
        for (int64_t block = 0; block < blocks_; ++block)
            StateView<Real>(p_.d_initial_state, n, head, block * kCols<Real>, p_.K, cols_of(block))
                .store(kernel_, rows.D + block * block_elems(), kCols<Real>);
    }

    void load_state(const Tensor &pool, int64_t n, int64_t head, int64_t block, Real *to) const {
        if (pool)
            StateView<Real>(pool, n, head, block * kCols<Real>, p_.K, cols_of(block)).load(kernel_, to);
        else
            std::fill_n(to, block_elems(), Real(0));
    }

    // [size][kCols] of v or d_o.
    void load_block(const Tensor &x, const TokenRun &run, int64_t block, Real *to) const {
        if (cols_of(block) < kCols<Real>) std::fill_n(to, run.size * kCols<Real>, Real(0));
        load_tokens(kernel_, to, kCols<Real>, x, run, run.head, block * kCols<Real>, cols_of(block));
    }

    // The state at the start of the chunk that follows.
    void mark_next(const Rows &rows, const TokenRun &run, int64_t chunk, int64_t block) const {
        const int64_t K = p_.K;
        load_block(p_.v, run, block, rows.e);
        const Real *S = mark(rows, chunk, block);
        Real *const next = mark(rows, chunk + 1, block);
        for (int64_t i = 0; i < run.size; ++i, S = next)
            bwd_.forward(S, next, rows.tokens.decay + i * K, rows.tokens.k + i * K, rows.e + i * kCols<Real>, rows.u,
                         rows.tokens.beta[i], K);
    }

    void reverse_chunk(const Rows &rows, const TokenRun &run, const Real *start, int64_t block, int64_t first) const {
        const int64_t K = p_.K, C = kCols<Real>;
        const TokenRows<Real> &x = rows.tokens;
        load_block(p_.v, run, block, rows.e);
        load_block(p_.d_o, run, block, rows.d_o);
        const auto after = [&](int64_t i) { return i < 0 ? start : rows.states + i * block_elems(); };
        for (int64_t i = 0; i < run.size; ++i)
            bwd_.forward(after(i - 1), rows.states + i * block_elems(), x.decay + i * K, x.k + i * K, rows.e + i * C,
                         rows.u + i * C, x.beta[i], K);
        for (int64_t i = run.size - 1; i >= 0; --i) {
            ReverseToken<Real> token;
            token.before = after(i - 1), token.after = after(i);
            token.q = x.q + i * K, token.k = x.k + i * K, token.decay = x.decay + i * K;
            token.d_o = rows.d_o + i * C, token.e = rows.e + i * C, token.u = rows.u + i * C;
            token.beta = x.beta[i], token.scale = static_cast<Real>(p_.scale);
            token.D = rows.D + block * block_elems();
            token.dq = rows.dq + (first + i) * K, token.dk = rows.dk + (first + i) * K;
            token.dg = rows.dg_channels + i * K;
            token.dv = rows.dv + i * C, token.dbeta = rows.dbeta + i;
            bwd_.reverse(token, K);
        }
        store_tokens(kernel_, p_.dv, run, run.head, block * C, rows.dv, C, cols_of(block));
    }

    // Through the gate and the form of beta, and out.
    void finish_gates(const Rows &rows, const TokenRun &run, const GateOptions<Real> &gate, int64_t n) {
        Real *dg = rows.dg_channels;
        if (p_.family == Family::Gdn) {
            dg = rows.dg;
            for (int64_t i = 0; i < run.size; ++i) {
                double sum = 0;
                for (int64_t c = 0; c < p_.K; ++c) sum += rows.dg_channels[i * p_.K + c];
                dg[i] = static_cast<Real>(sum);
            }
        }
        if (p_.gate != Gate::None) {
            const int64_t at = n * p_.HV + run.head;
            double unused = 0, *const dA_log = p_.A_log ? &dA_log_[at] : &unused;
            load_gates(p_, kernel_, run, rows.raw);
            for (int64_t i = 0; i < run.size; ++i)
                gate_gradient(p_, gate, rows.raw + i * channels_, rows.tokens.gates + i * channels_, dg + i * channels_,
                              channels_, dA_log, &ddt_bias_[at * channels_]);
        }
        const int64_t column = p_.family == Family::Kda ? p_.dg.stride[3] : 1;
        kernel_.store(element(p_.dg, run.b, run.t, run.head), p_.dg.dtype, p_.dg.stride[1], column, dg, channels_, run.size,
                      channels_);
        load_beta(p_, kernel_, run, rows.tokens.beta);
        beta_gradient(p_.beta_form, rows.tokens.beta, rows.dbeta, run.size);
        kernel_.store(element(p_.dbeta, run.b, run.t, run.head), p_.dbeta.dtype, 0, p_.dbeta.stride[1], rows.dbeta, run.size, 1,
                      run.size);
    }

    // Through the normalisation, and out.
    void finish_keys(const Rows &rows, const TokenRun &run, int64_t k_head, const Tensor &x, Real *dx,
                     const Tensor &out) const {
        if (p_.qk_l2norm) {
            load_tokens(kernel_, rows.x, p_.K, x, run, k_head, 0, p_.K);
            unit_gradient(rows.x, dx, run.size, p_.K);
        }
        store_tokens(kernel_, out, run, k_head, 0, dx, p_.K, p_.K);
    }

    // out[head, c] = sum over n of sums[n][head][c]
    void store_sums(const Tensor &out, const std::vector<double> &sums, int64_t width) const {
        for (int64_t head = 0; head < p_.HV; ++head)
            for (int64_t c = 0; c < width; ++c) {
                double sum = 0;
                for (int64_t n = 0; n < p_.N; ++n) sum += sums[(n * p_.HV + head) * width + c];
                kernels<double>(Isa::Baseline).store(element(out, head, width > 1 ? c : 0), out.dtype, 0, 1, &sum, 1, 1, 1);
            }
    }

    const BwdParams &p_;
    const Kernels<Real> &kernel_;
    const BwdKernels<Real> &bwd_;
    const int64_t longest_, chunk_, channels_;
    const Schedule schedule_;
    const int64_t blocks_;
    std::vector<double> dA_log_, ddt_bias_;  // [N][HV], [N][HV][channels]; each element is one task's
    const Tensor saved_;
    std::vector<int64_t> saved_starts_;  // row of each sequence's first, where the forward saved them
    const Scratch scratch_;
};

}  // namespace

template <class Real>
void run_bwd(const BwdParams &p) {
    Backward<Real>(p).run();
}

template void run_bwd<float>(const BwdParams &);
template void run_bwd<double>(const BwdParams &);

}  // namespace linattn::cpu
