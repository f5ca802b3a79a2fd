#include "values.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "error.h"

namespace linattn {
namespace {

using Ints = std::vector<int64_t>;

// An integer array of [rows, columns] on the host, whatever its strides and wherever it is.
Ints read_ints(const Tensor &t, int64_t rows, int64_t columns, bool on_gpu, int device, void *stream) {
    Ints out(static_cast<size_t>(rows * columns));
    if (out.empty()) return out;
    int64_t size = dtype_bytes(t.dtype);
    int64_t reach[2] = {(rows - 1) * t.stride[0] * size, columns > 1 ? (columns - 1) * t.stride[1] * size : 0};
    int64_t lo = std::min<int64_t>(reach[0], 0) + std::min<int64_t>(reach[1], 0);
    int64_t hi = std::max<int64_t>(reach[0], 0) + std::max<int64_t>(reach[1], 0) + size;
    std::vector<char> copy;
    const char *first = t.data;
    if (on_gpu) {
        copy.resize(static_cast<size_t>(hi - lo));
#ifdef LINATTN_WITH_CUDA
        cuda::copy_to_host(copy.data(), t.data + lo, hi - lo, device, stream);
#else
        (void)device, (void)stream;
#endif
        first = copy.data() - lo;
    }
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
            const char *at = first + (i * t.stride[0] + (columns > 1 ? j * t.stride[1] : 0)) * size;
            int32_t narrow;
            int64_t wide;
            if (t.dtype == DType::I32)
                std::memcpy(&narrow, at, sizeof narrow), wide = narrow;
            else
                std::memcpy(&wide, at, sizeof wide);
            out[static_cast<size_t>(i * columns + j)] = wide;
        }
    return out;
}

void check_lengths(const char *op, const Ints &cu, int64_t T) {
    if (cu[0] != 0) fail(Status::Value, "%s: cu_seqlens must start at 0, got %lld", op, static_cast<long long>(cu[0]));
    for (size_t n = 1; n < cu.size(); ++n)
        if (cu[n] < cu[n - 1])
            fail(Status::Value, "%s: cu_seqlens must never fall, but cu_seqlens[%zu] = %lld follows %lld", op, n,
                 static_cast<long long>(cu[n]), static_cast<long long>(cu[n - 1]));
    if (cu.back() > T)
        fail(Status::Value, "%s: cu_seqlens ends at %lld, but there are %lld tokens", op, static_cast<long long>(cu.back()),
             static_cast<long long>(T));
}

void check_range(const char *op, const char *name, const Ints &rows, int64_t limit, const char *pool) {
    for (size_t i = 0; i < rows.size(); ++i)
        if (rows[i] < -1 || rows[i] >= limit)
            fail(Status::Value, "%s: %s[%zu] is %lld; -1 (none) and the %lld rows of %s are possible", op, name, i,
                 static_cast<long long>(rows[i]), static_cast<long long>(limit), pool);
}

// A state that goes to a row: after so many tokens of a sequence.
struct Write {
    int64_t row;
    size_t sequence;
    int64_t token;
    bool operator<(const Write &other) const {
        return std::tie(row, sequence, token) < std::tie(other.row, other.sequence, other.token);
    }
};

// Two states going to one row would give results that depend on timing; the same state may go there twice.
void check_written_once(const char *op, const char *holds, std::vector<Write> writes) {
    std::sort(writes.begin(), writes.end());
    for (size_t i = 1; i < writes.size(); ++i) {
        const Write &x = writes[i - 1], &y = writes[i];
        if (x.row == y.row && (x.sequence != y.sequence || x.token != y.token))
            fail(Status::Value, "%s: %s row %lld more than once; each row may be written once", op, holds,
                 static_cast<long long>(y.row));
    }
}

// So would a sequence reading what another writes, where both meet in one pool. `own`: it may write the row that it reads.
void check_races(const char *op, const Ints &reads, std::vector<Write> writes, bool own) {
    std::sort(writes.begin(), writes.end());
    for (size_t n = 0; n < reads.size(); ++n) {
        if (reads[n] < 0) continue;
        auto hit = std::lower_bound(writes.begin(), writes.end(), Write{reads[n], 0, 0});
        if (hit != writes.end() && hit->row == reads[n] && !(own && hit->sequence == n))
            fail(Status::Value, "%s: row %lld is read by sequence %zu and written by sequence %zu in one call", op,
                 static_cast<long long>(reads[n]), n, hit->sequence);
    }
}

Ints rows_or_default(const Tensor &t, int64_t N, bool on_gpu, int device, void *stream) {
    if (t) return read_ints(t, N, 1, on_gpu, device, stream);
    Ints rows(static_cast<size_t>(N));
    for (size_t n = 0; n < rows.size(); ++n) rows[n] = static_cast<int64_t>(n);
    return rows;
}

float half_to_float(uint16_t h) {
    uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
    float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                                     : std::ldexp(exponent ? 1024.0f + mantissa : mantissa, std::max<int>(exponent, 1) - 25);
    return h & 0x8000 ? -magnitude : magnitude;
}

double read_float(const Tensor &t, const char *at) {
    uint16_t bits;
    uint32_t wide;
    float f;
    double d;
    switch (t.dtype) {
        case DType::F64: return std::memcpy(&d, at, 8), d;
        case DType::F32: return std::memcpy(&f, at, 4), f;
        case DType::BF16:
            return std::memcpy(&bits, at, 2), wide = static_cast<uint32_t>(bits) << 16, std::memcpy(&f, &wide, 4), f;
        default: return std::memcpy(&bits, at, 2), half_to_float(bits);
    }
}

// Tokens of padding sequences and past the last one may hold anything.
void check_gate_sign(const char *op, const DeltaParams &p, const Ints &cu, const Ints &reads, bool on_gpu) {
    int64_t channels = p.family == Family::Kda ? p.K : 1;
    bool bad = false;
    auto check = [&](int64_t b, int64_t first, int64_t end) {
        if (on_gpu) {
#ifdef LINATTN_WITH_CUDA
            bad |= cuda::any_positive_g(p, b, first, end);
#endif
            return;
        }
        for (int64_t t = first; t < end; ++t)
            for (int64_t h = 0; h < p.HV; ++h)
                for (int64_t c = 0; c < channels; ++c) {
                    int64_t at =
                        b * p.g.stride[0] + t * p.g.stride[1] + h * p.g.stride[2] + (channels > 1 ? c * p.g.stride[3] : 0);
                    bad |= !(read_float(p.g, p.g.data + at * dtype_bytes(p.g.dtype)) <= 0);
                }
    };
    for (int64_t n = 0; n < p.N; ++n) {
        size_t i = static_cast<size_t>(n);
        if (reads[i] < 0) continue;
        cu.empty() ? check(n, 0, p.T) : check(0, cu[i], cu[i + 1]);
    }
    if (bad)
        fail(Status::Value,
             "%s: g has values above 0 or NaN; g is the natural logarithm of the decay, so it must be <= 0 "
             "(a linear decay alpha is passed as log(alpha))",
             op);
}

}  // namespace

void check_values(const char *op, const DeltaParams &p, bool on_gpu, bool checked) {
    if (on_gpu && !checked) return;
    auto ints = [&](const Tensor &t, int64_t rows, int64_t columns) {
        return read_ints(t, rows, columns, on_gpu, p.device, p.stream);
    };
    Ints cu;
    if (p.cu_seqlens) {
        cu = ints(p.cu_seqlens, p.N + 1, 1);
        check_lengths(op, cu, p.T);
        if (p.checkpoints && !p.checkpoint_indices) {
            int64_t rows = 0;
            for (size_t n = 1; n < cu.size(); ++n) rows += (cu[n] - cu[n - 1]) / p.checkpoint_every;
            if (p.C < rows)
                fail(Status::Value, "%s: checkpoints has %lld rows, but these lengths give %lld", op,
                     static_cast<long long>(p.C), static_cast<long long>(rows));
        }
    }
    Ints reads = rows_or_default(p.read_indices, p.N, on_gpu, p.device, p.stream);
    if (p.read_indices) check_range(op, "read_indices", reads, p.P, p.op == Op::Fwd ? "initial_state" : "state");
    const auto same = [](const Tensor &a, const Tensor &b) { return a && b && a.data == b.data; };
    const auto length = [&](size_t n) { return cu.empty() ? p.T : cu[n + 1] - cu[n]; };
    std::vector<Write> writes;
    if (p.state_out && (p.op != Op::Verify || p.write_indices)) {
        const bool every_token = p.op == Op::Verify;
        const int64_t each = every_token ? p.T : 1;
        const Ints rows = p.write_indices ? ints(p.write_indices, p.N, each) : rows_or_default({}, p.N, false, 0, nullptr);
        check_range(op, "write_indices", rows, p.F, p.op == Op::Fwd ? "final_state" : "state");
        for (size_t i = 0; i < rows.size(); ++i) {
            const size_t n = i / static_cast<size_t>(each);
            if (rows[i] >= 0 && reads[n] >= 0)
                writes.push_back({rows[i], n, every_token ? static_cast<int64_t>(i) % each + 1 : length(n)});
        }
        check_written_once(op, "write_indices holds", writes);
        if (same(p.state_in, p.state_out)) check_races(op, reads, writes, each == 1);
    }
    if (p.checkpoint_indices) {
        const Ints rows = ints(p.checkpoint_indices, p.N, p.M);
        check_range(op, "checkpoint_indices", rows, p.C, "checkpoints");
        std::vector<Write> checkpoints;
        for (size_t i = 0; i < rows.size(); ++i) {
            const size_t n = i / static_cast<size_t>(p.M);
            const int64_t token = (static_cast<int64_t>(i) % p.M + 1) * p.checkpoint_every;
            if (rows[i] >= 0 && reads[n] >= 0 && token <= length(n)) checkpoints.push_back({rows[i], n, token});
        }
        check_written_once(op, "checkpoint_indices holds", checkpoints);
        if (same(p.checkpoints, p.state_in)) check_races(op, reads, checkpoints, false);
        if (same(p.checkpoints, p.state_out)) {
            writes.insert(writes.end(), checkpoints.begin(), checkpoints.end());
            check_written_once(op, "write_indices and checkpoint_indices hold", writes);
        }
    }
    if (p.parents) {
        Ints parents = ints(p.parents, p.N, p.T);
        for (size_t i = 0; i < parents.size(); ++i) {
            int64_t token = static_cast<int64_t>(i) % p.T;
            if (parents[i] < -1 || parents[i] >= token)
                fail(Status::Value, "%s: parents[%lld,%lld] is %lld; -1 (the state) and earlier tokens are possible", op,
                     static_cast<long long>(static_cast<int64_t>(i) / p.T), static_cast<long long>(token),
                     static_cast<long long>(parents[i]));
        }
    }
    if (checked && p.gate == Gate::None) check_gate_sign(op, p, cu, reads, on_gpu);
}

void check_values(const char *op, const CommitParams &p, bool on_gpu, bool checked) {
    if (on_gpu && !checked) return;
    Ints reads = rows_or_default(p.read_indices, p.N, on_gpu, p.device, p.stream);
    Ints writes = rows_or_default(p.write_indices, p.N, on_gpu, p.device, p.stream);
    check_range(op, "read_indices", reads, p.P, "state");
    check_range(op, "write_indices", writes, p.P, "state");
    std::vector<Write> to;
    for (size_t n = 0; n < writes.size(); ++n)
        if (reads[n] >= 0 && writes[n] >= 0) to.push_back({writes[n], n, 0});
    check_written_once(op, "write_indices holds", to);
    check_races(op, reads, to, true);
    if (!p.path) return;
    Ints path = read_ints(p.path, p.N, p.T, on_gpu, p.device, p.stream);
    Ints accepted = read_ints(p.accepted, p.N, 1, on_gpu, p.device, p.stream);
    for (int64_t n = 0; n < p.N; ++n)
        for (int64_t j = 0; j < std::min(accepted[static_cast<size_t>(n)], p.T); ++j)
            if (int64_t token = path[static_cast<size_t>(n * p.T + j)]; token < 0 || token >= p.T)
                fail(Status::Value, "%s: path[%lld,%lld] is %lld; the tokens 0 to %lld are possible", op,
                     static_cast<long long>(n), static_cast<long long>(j), static_cast<long long>(token),
                     static_cast<long long>(p.T - 1));
}

}  // namespace linattn
