// {gdn,kda}_bwd on a GPU, exact and in float: launches and what surrounds the main passes.
//
//   plan      chunks of each sequence, summed                       prepare   q, k normalised, decays, beta activated, in float
//   scans     delta_bwd_scan.cu                                     chunks    delta_bwd_chunk.cu
//   keys      dq, dk: the value heads of a key head added up in order, through the normalisation
//   sums      dA_log, ddt_bias: the chunks added up in order
//
// and {gdn,kda}_segment: prepare, and one scan of the map (delta_bwd_scan.cu).
//
// Nothing of the forward is needed. No atomics; a sequence's gradients do not depend on what it is packed with.
#include "common/device_guard.h"
#include "common/launch.h"
#include "tokens.cuh"

namespace linattn::cuda {
namespace delta_bwd {

constexpr int kRowThreads = 256;  // 8 rows, one a warp

__global__ void __launch_bounds__(1024) delta_bwd_plan_kernel(const __grid_constant__ BwdCall call) {
    __shared__ int of_warp[32];
    ptx::griddepcontrol_launch_dependents();
    const int N = static_cast<int>(call.p.N), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (call.w.flags)
        for (int64_t i = threadIdx.x; i < call.cleared; i += 1024) call.w.flags[i] = call.kept ? call.kept[i] : 0;
    int before = 0;
    for (int first = 0; first < N; first += 1024) {
        const int n = first + static_cast<int>(threadIdx.x);
        const int own = n < N ? (make_item(call.p, n, 0, 0).length + kBwdChunk - 1) / kBwdChunk : 0;
        int sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        __syncthreads();
        if (lane == 31) of_warp[warp] = sum;
        __syncthreads();
        int all = 0;
        for (int i = 0; i < 32; ++i) {
            if (i < warp) sum += of_warp[i];
            all += of_warp[i];
        }
        if (n < N) call.w.chunk_start[n] = before + sum - own;
        before += all;
    }
    if (threadIdx.x == 0) call.w.chunk_start[N] = before;
}

// Rows of the token dimension that belong to a sequence.
__device__ __forceinline__ bool is_token(const DeltaParams &p, int64_t t) {
    return !p.cu_seqlens || (t >= clamped_start(p, 0) && t < clamped_start(p, p.N));
}

// 1 / |x| of a row held D / 32 elements a lane.
template <int kCount>
__device__ __forceinline__ float inverse_norm(const float (&x)[kCount]) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) squares = fmaf(x[i], x[i], squares);
    return 1.0f / sqrtf(sum_over<32>(squares) + 1e-6f);
}

// By a warp, of a token and value head: decays and beta; and of a key head, unless it is negative: rows of q and k.
template <int D, bool kKda>
__device__ __forceinline__ void prepare_row(const BwdCall &call, int64_t b, int64_t t, int64_t head, int64_t key_head) {
    const BwdParams &p = call.p;
    constexpr int kCount = D / 32;
    const int lane = threadIdx.x % 32;
    const int64_t row = b * p.T + t, i = row * p.HV + head;
    if (key_head >= 0) {
        const auto take = [&](const Tensor &from, float *to) {
            float x[kCount];
#pragma unroll
            for (int c = 0; c < kCount; ++c) x[c] = load_float(from, element(from, b, t, key_head, lane + 32 * c));
            const float factor = p.qk_l2norm ? inverse_norm(x) : 1.0f;
#pragma unroll
            for (int c = 0; c < kCount; ++c) to[(row * p.H + key_head) * D + lane + 32 * c] = x[c] * factor;
        };
        take(p.q, call.w.q);
        take(p.k, call.w.k);
    }
    const float amplitude = amplitude_of(p, head);
    const auto decay = [&](int channel) {
        return expf(log_decay(p, gate_input(p, element(p.g, b, t, head, kKda ? channel : 0), head, channel), amplitude));
    };
    if constexpr (kKda) {
#pragma unroll
        for (int c = 0; c < kCount; ++c) call.w.decay[i * D + lane + 32 * c] = decay(lane + 32 * c);
    } else if (lane == 0) {
        call.w.decay[i] = decay(0);
    }
    if (lane == 0) call.w.beta[i] = beta_of(p, load_float(p.beta, element(p.beta, b, t, head)));
}

// A warp takes one token and head. With flags: those of the flagged sequences and heads, a CTA a chunk and head.
template <int D, bool kKda>
__global__ void __launch_bounds__(kRowThreads) delta_bwd_prepare_kernel(const __grid_constant__ BwdCall call) {
    const BwdParams &p = call.p;
    constexpr int kWarps = kRowThreads / 32;
    const int warp = threadIdx.x / 32;
    after_those_before();
    if (nothing_flagged(call)) return;
    if (call.w.flags) {
        for (int64_t i = blockIdx.x; i < call.w.chunk_start[p.N] * p.HV; i += gridDim.x) {
            const Chunk c = find_chunk(p, call.w.chunk_start, i / p.HV, i % p.HV);
            if (left_out(call, c.n, c.head)) continue;
            bool first = true;  // of the key head's flagged ones
            for (int64_t head = c.key_head * (p.HV / p.H); head < c.head; ++head) first = first && left_out(call, c.n, head);
            const int64_t key_head = first ? c.key_head : -1;
#pragma unroll 1
            for (int64_t t = c.token + warp; t < c.token + c.length; t += kWarps)
                prepare_row<D, kKda>(call, c.b, t, c.head, key_head);
        }
        return;
    }
    for (int64_t i = int64_t{blockIdx.x} * kWarps + warp; i < p.B * p.T * p.HV; i += int64_t{gridDim.x} * kWarps) {
        const int64_t row = i / p.HV, head = i % p.HV, b = row / p.T, t = row % p.T;
        if (is_token(p, t)) prepare_row<D, kKda>(call, b, t, head, head < p.H ? head : -1);
    }
}

// y = x r, r = 1 / sqrt(sum x^2 + 1e-6):  dx = r (dy - y (dy . y)). A warp takes one token and key head.
template <int D>
__global__ void __launch_bounds__(kRowThreads) delta_bwd_keys_kernel(const __grid_constant__ BwdCall call) {
    const BwdParams &p = call.p;
    constexpr int kCount = D / 32;
    const int lane = threadIdx.x % 32;
    const int64_t step = int64_t{gridDim.x} * (kRowThreads / 32), group = p.HV / p.H;
    after_those_before();
    for (int64_t i = int64_t{blockIdx.x} * (kRowThreads / 32) + threadIdx.x / 32; i < p.B * p.T * p.H; i += step) {
        const int64_t row = i / p.H, head = i % p.H, b = row / p.T, t = row % p.T;
        if (!is_token(p, t)) continue;
        const auto give = [&](const float *from, const float *unit, const Tensor &raw, const Tensor &to) {
            float dy[kCount] = {}, x[kCount];
            for (int64_t r = 0; r < group; ++r)
#pragma unroll
                for (int c = 0; c < kCount; ++c) dy[c] += from[(row * p.HV + head * group + r) * D + lane + 32 * c];
            if (p.qk_l2norm) {
                float along = 0.0f;
#pragma unroll
                for (int c = 0; c < kCount; ++c) {
                    x[c] = load_float(raw, element(raw, b, t, head, lane + 32 * c));
                    along = fmaf(dy[c], unit[i * D + lane + 32 * c], along);
                }
                along = sum_over<32>(along);
                const float factor = inverse_norm(x);
#pragma unroll
                for (int c = 0; c < kCount; ++c) dy[c] = factor * (dy[c] - unit[i * D + lane + 32 * c] * along);
            }
#pragma unroll
            for (int c = 0; c < kCount; ++c) store_float(to, element(to, b, t, head, lane + 32 * c), dy[c]);
        };
        give(call.w.dq, call.w.q, p.q, p.dq);
        give(call.w.dk, call.w.k, p.k, p.dk);
    }
}

// Sum over all chunks, in order, of what one head (dA_log) or one head and channel (ddt_bias) got.
__global__ void __launch_bounds__(kRowThreads) delta_bwd_sums_kernel(const __grid_constant__ BwdCall call, int64_t channels) {
    const BwdParams &p = call.p;
    const int64_t i = int64_t{blockIdx.x} * kRowThreads + threadIdx.x, head = i / channels, channel = i % channels;
    after_those_before();
    if (head >= p.HV) return;
    const int chunks = call.w.chunk_start[p.N];
    const auto sum = [&](const float *from, int64_t width, int64_t at) {
        double total = 0.0;
        for (int64_t chunk = 0; chunk < chunks; ++chunk) total += from[chunk * width + at];
        return static_cast<float>(total);
    };
    if (p.ddt_bias)
        store_float(p.ddt_bias, head * p.ddt_bias.stride[0] + channel * p.ddt_bias.stride[1],
                    sum(call.w.dbias, p.HV * channels, i));
    if (p.dA_log && channel == 0) store_float(p.dA_log, head * p.dA_log.stride[0], sum(call.w.dA, p.HV, head));
}

int64_t channels_of(const BwdParams &p) { return p.family == Family::Kda ? p.K : 1; }

// Cuts the workspace; returns the bytes that it takes. `base` may be null. A segment needs the inputs in float alone.
uint64_t cut(const BwdParams &p, bool segment, char *base, BwdWorkspace &w) {
    uint64_t used = 0;
    const auto take = [&](auto *&piece, int64_t count) {
        piece = base ? reinterpret_cast<std::remove_reference_t<decltype(piece)>>(base + used) : nullptr;
        used += (static_cast<uint64_t>(count) * sizeof(*piece) + 255) / 256 * 256;
    };
    const int64_t rows = p.B * p.T, channels = channels_of(p);
    take(w.q, rows * p.H * p.K), take(w.k, rows * p.H * p.K);
    take(w.decay, rows * p.HV * channels), take(w.beta, rows * p.HV);
    if (segment) return used;
    w.chunks = most_bwd_chunks(p);
    take(w.chunk_start, p.N + 1);
    take(w.e, rows * p.HV * p.V), take(w.du, rows * p.HV * p.V);
    take(w.states, w.chunks * p.HV * p.K * p.V), take(w.grads, w.chunks * p.HV * p.K * p.V);
    take(w.dq, rows * p.HV * p.K), take(w.dk, rows * p.HV * p.K);
    take(w.dA, w.chunks * p.HV), take(w.dbias, w.chunks * p.HV * channels);
    return used;
}

char *aligned(const Tensor &workspace) {
    return reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(workspace.data) + 255) / 256 * 256);
}

LaunchConfig rows_config(const BwdParams &p, int64_t rows) {
    LaunchConfig config;
    const int64_t blocks = (rows + kRowThreads / 32 - 1) / (kRowThreads / 32);
    config.grid.x = blocks < (int64_t{1} << 30) ? blocks : int64_t{1} << 30;
    config.block.x = kRowThreads;
    config.stream = static_cast<cudaStream_t>(p.stream);
    config.programmatic = true;
    return config;
}

template <int D>
void launch_prepare(const BwdCall &call) {
    LaunchConfig rows = rows_config(call.p, call.p.B * call.p.T * call.p.HV);
    if (call.w.flags && rows.grid.x > kFlaggedGrid) rows.grid.x = kFlaggedGrid;
    rows.programmatic = !call.transition;  // of a segment it is the first
    if (call.p.family == Family::Kda)
        launch("delta_bwd_prepare_kernel", delta_bwd_prepare_kernel<D, true>, rows, call);
    else
        launch("delta_bwd_prepare_kernel", delta_bwd_prepare_kernel<D, false>, rows, call);
}

template <int D>
void launch_keys(const BwdCall &call) {
    launch("delta_bwd_keys_kernel", delta_bwd_keys_kernel<D>, rows_config(call.p, call.p.B * call.p.T * call.p.H), call);
}

BwdParams inputs_of(const SegmentParams &s) {
    BwdParams p;
    static_cast<DeltaParams &>(p) = s;
    p.d_o = s.d_o;
    return p;
}

}  // namespace delta_bwd

uint64_t cut_delta_bwd_workspace(const BwdParams &p, char *base, BwdWorkspace &w) { return delta_bwd::cut(p, false, base, w); }

uint64_t delta_bwd_workspace_bytes(const BwdParams &p) {
    BwdWorkspace w = {};
    return cut_delta_bwd_workspace(p, nullptr, w) + 256;
}

void launch_delta_bwd_plan(const BwdCall &call) {
    LaunchConfig config;
    config.block.x = 1024;
    config.stream = static_cast<cudaStream_t>(call.p.stream);
    launch("delta_bwd_plan_kernel", delta_bwd::delta_bwd_plan_kernel, config, call);
}

void launch_delta_bwd_prepare(const BwdCall &call) {
    call.p.K == 128 ? delta_bwd::launch_prepare<128>(call) : delta_bwd::launch_prepare<64>(call);
}

void launch_delta_bwd_sums(const BwdCall &call) {
    const BwdParams &p = call.p;
    if (!p.dA_log && !p.ddt_bias) return;
    const int64_t channels = delta_bwd::channels_of(p);
    LaunchConfig config;
    config.grid.x = (p.HV * channels + delta_bwd::kRowThreads - 1) / delta_bwd::kRowThreads;
    config.block.x = delta_bwd::kRowThreads;
    config.stream = static_cast<cudaStream_t>(p.stream);
    config.programmatic = true;
    launch("delta_bwd_sums_kernel", delta_bwd::delta_bwd_sums_kernel, config, call, channels);
}

void launch_delta_bwd(const BwdParams &p) {
    DeviceGuard guard(p.device);
    BwdCall call = {};
    call.p = p;
    cut_delta_bwd_workspace(p, delta_bwd::aligned(p.workspace), call.w);
    launch_delta_bwd_plan(call);
    launch_delta_bwd_prepare(call);
    launch_delta_bwd_scans(call);
    launch_delta_bwd_chunks(call);
    p.K == 128 ? delta_bwd::launch_keys<128>(call) : delta_bwd::launch_keys<64>(call);
    launch_delta_bwd_sums(call);
}

uint64_t delta_segment_workspace_bytes(const SegmentParams &p) {
    BwdWorkspace w = {};
    return delta_bwd::cut(delta_bwd::inputs_of(p), true, nullptr, w) + 256;
}

void launch_delta_segment(const SegmentParams &p) {
    DeviceGuard guard(p.device);
    BwdCall call = {};
    call.p = delta_bwd::inputs_of(p);
    call.transition = p.transition, call.added = p.added;
    delta_bwd::cut(call.p, true, delta_bwd::aligned(p.workspace), call.w);
    launch_delta_bwd_prepare(call);
    launch_delta_segment_scan(call, p.backward);
}

}  // namespace linattn::cuda
