// delta_commit: replays what a verify call kept, S = exp(g_t) S + k_t u_t^T for the accepted tokens in order, with the very
// `advance` that decode runs, so that the state comes out bit-equal to decoding those tokens.
//
// A task is one (sequence, value head), or a group of its column blocks. It takes up to kChunk tokens at a time:
//   prepare   k rows and decay rows, gathered along `path`
//   blocks    for each block of columns, advance the state token by token
#include <vector>

#include "delta.h"
#include "schedule.h"

namespace linattn::cpu {
namespace {

template <class Real>
struct CommitRows {
    Real *k, *decay;  // [chunk][K]
    Real *gates;      // [chunk], one decay per token
    Real *zeros;      // [K], no token follows
    Real *u;          // [chunk][kCols]
    Real *y, *z;      // [kCols], not looked at
    Real *states;     // [slots][K][kCols]

    CommitRows(Cutter &cut, int64_t K, int64_t chunk, int64_t slots)
        : k(cut.take<Real>(chunk * K)),
          decay(cut.take<Real>(chunk * K)),
          gates(cut.take<Real>(chunk)),
          zeros(cut.take<Real>(K)),
          u(cut.take<Real>(chunk * kCols<Real>)),
          y(cut.take<Real>(kCols<Real>)),
          z(cut.take<Real>(kCols<Real>)),
          states(cut.take<Real>(slots * K * kCols<Real>)) {}
};

template <class Real>
class Commit {
  public:
    explicit Commit(const CommitParams &p)
        : p_(p),
          kernel_(kernels<Real>(detect_isa())),
          schedule_(p.N, p.HV, p.V, kCols<Real>, double(p.N) * p.T * p.HV * p.K * p.V,
                    2.0 * p.N * p.HV * p.K * p.V * dtype_bytes(p.state.dtype)),
          chunk_(std::clamp<int64_t>(p.T, 1, kChunk)),
          slots_(p.T > kChunk ? schedule_.blocks_per_group() : 1),
          scratch_(part_bytes(), schedule_.workers) {}

    void run() const {
        parallel_for(schedule_.tasks(), schedule_.workers, [this](int64_t task, int worker) { run_task(task, worker); });
    }

  private:
    int64_t part_bytes() const {
        Cutter cut(nullptr);
        CommitRows<Real>(cut, p_.K, chunk_, slots_);
        return cut.bytes();
    }

    // Number of tokens to fold in for sequence n: up to the first entry of `path` that names none.
    int64_t accepted(int64_t n) const {
        const int64_t most = std::clamp<int64_t>(index_at(p_.accepted, n), 0, p_.T);
        int64_t count = 0;
        while (count < most && clamp_row(token(n, count), p_.T) >= 0) ++count;
        return count;
    }
    int64_t token(int64_t n, int64_t i) const { return p_.path ? index_at(p_.path, n, i) : i; }

    void run_task(int64_t task, int worker) const {
        const int64_t n = schedule_.sequence(task), head = schedule_.head(task);
        const int64_t read = pool_row(p_.read_indices, n, p_.P), write = pool_row(p_.write_indices, n, p_.P);
        if (read < 0 || write < 0) return;
        Cutter cut(scratch_.part(worker));
        const CommitRows<Real> rows(cut, p_.K, chunk_, slots_);
        const int64_t first_block = schedule_.first_block(task), end_block = schedule_.end_block(task);
        const int64_t count = accepted(n);
        if (count == 0) {
            const int64_t cols = kCols<Real>, end = std::min(end_block * cols, p_.V);
            if (read != write)
                copy_state(kernels<double>(Isa::Baseline), p_.state, read, p_.state, write, head, first_block * cols, end, p_.K,
                           reinterpret_cast<double *>(rows.states));
            return;
        }
        std::fill_n(rows.zeros, p_.K, Real(0));
        for (int64_t first = 0; first < count; first += chunk_) {
            const int64_t size = std::min(chunk_, count - first);
            prepare(rows, n, head, first, size);
            for (int64_t block = first_block; block < end_block; ++block) {
                const int64_t col = block * kCols<Real>, cols = std::min(kCols<Real>, p_.V - col);
                Real *slot = rows.states + (slots_ > 1 ? block - first_block : 0) * p_.K * kCols<Real>;
                const StateView<Real> from(p_.state, read, head, col, p_.K, cols), to(p_.state, write, head, col, p_.K, cols);
                run_block(rows, n, head, first, size, slot, first == 0 ? from : StateView<Real>(),
                          first + size == count ? to : StateView<Real>(), col, cols);
            }
        }
    }

    // Rows of k and of exp(g) for the i-th accepted tokens, i in [first, first + size).
    void prepare(const CommitRows<Real> &rows, int64_t n, int64_t head, int64_t first, int64_t size) const {
        const int64_t K = p_.K, k_head = head / (p_.HV / p_.H);
        for (int64_t i = 0; i < size; ++i) {
            const int64_t t = token(n, first + i);
            kernel_.load(rows.k + i * K, K, element(p_.k, n, t, k_head), p_.k.dtype, 0, p_.k.stride[3], 1, K);
            Real *g = p_.per_channel ? rows.decay + i * K : rows.gates + i;
            kernel_.load(g, K, element(p_.g, n, t, head), p_.g.dtype, 0, p_.g.stride[3], 1, p_.per_channel ? K : 1);
        }
        if (p_.per_channel) return kernel_.exp(rows.decay, size * K);
        kernel_.exp(rows.gates, size);
        for (int64_t i = 0; i < size; ++i) std::fill_n(rows.decay + i * K, K, rows.gates[i]);
    }

    // `from` and `to` are set for the first and the last chunk alone.
    void run_block(const CommitRows<Real> &rows, int64_t n, int64_t head, int64_t first, int64_t size, Real *slot,
                   const StateView<Real> &from, const StateView<Real> &to, int64_t col, int64_t cols) const {
        constexpr int64_t ld = kCols<Real>;
        const int64_t K = p_.K;
        if (cols < ld) std::fill_n(rows.u, size * ld, Real(0));
        for (int64_t i = 0; i < size; ++i)
            kernel_.load(rows.u + i * ld, ld, element(p_.u, n, token(n, first + i), head, col), p_.u.dtype, 0, p_.u.stride[3],
                         1, cols);
        const Real *S = slot;
        int64_t S_ld = ld;
        if (from && from.direct()) {
            S = from.at();
            S_ld = from.stride_k;
        } else if (from) {
            from.load(kernel_, slot);
        }
        for (int64_t i = 0; i < size; ++i) {
            const bool in_place = i + 1 == size && to && to.direct();
            Real *S_out = in_place ? to.at() : slot;
            const int64_t out_ld = in_place ? to.stride_k : ld;
            kernel_.advance(S, S_ld, S_out, out_ld, rows.decay + i * K, rows.k + i * K, rows.u + i * ld, rows.zeros, rows.zeros,
                            rows.y, rows.z, K);
            S = S_out;
            S_ld = out_ld;
        }
        if (to && !to.direct()) to.store(kernel_, slot, ld);
    }

    const CommitParams &p_;
    const Kernels<Real> &kernel_;
    const Schedule schedule_;
    const int64_t chunk_, slots_;
    const Scratch scratch_;
};

}  // namespace

template <class Real>
void run_commit(const CommitParams &p) {
    Commit<Real>(p).run();
}

template void run_commit<float>(const CommitParams &);
template void run_commit<double>(const CommitParams &);

}  // namespace linattn::cpu
