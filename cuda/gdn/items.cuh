// The work of a gdn launch, cut on the device from cu_seqlens: one item is a segment of one sequence, one value head and the
// columns of V of a CTA.
#pragma once
#include "shared.cuh"

namespace linattn::cuda::gdn {

struct KernelParams {
    DeltaParams p;
    int slots;                 // segments of all sequences together that run at once, N at least; 0: sequences are never cut
    float *g_segments;         // [slots][HV][2][D][D], V-first: N, then the state before the segment; M
    int *g_segment_tokens;     // what the Transition pass chose
    float scale, lower_bound;  // of p, in float
};

struct TensorMaps {
    CUtensorMap q, k, v, o;
};

// In gdn_fwd.cuh, compiled for each Config in the gdn_fwd_*.cu.
template <class C>
void launch_fwd(const KernelParams &params, const TensorMaps &maps, int multiprocessors);

__device__ __forceinline__ int load_index(const Tensor &t, int64_t at) {
    const int64_t value =
        t.dtype == DType::I32 ? reinterpret_cast<const int32_t *>(t.data)[at] : reinterpret_cast<const int64_t *>(t.data)[at];
    return value < -1 ? -1 : value > INT32_MAX ? INT32_MAX : static_cast<int>(value);
}

__device__ __forceinline__ float load_scalar(const Tensor &t, int64_t at) {
    if (t.dtype == DType::F32) return reinterpret_cast<const float *>(t.data)[at];
    const uint16_t bits = reinterpret_cast<const uint16_t *>(t.data)[at];
    return t.dtype == DType::BF16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

// Bound n of cu_seqlens, clamped to [0,T].
__device__ __forceinline__ int sequence_start(const DeltaParams &p, int n) {
    const int at = load_index(p.cu_seqlens, n * p.cu_seqlens.stride[0]), T = static_cast<int>(p.T);
    return at < 0 ? 0 : at > T ? T : at;
}

__device__ __forceinline__ void sequence_range(const DeltaParams &p, int n, int &bos, int &length) {
    bos = 0;
    length = static_cast<int>(p.T);
    if (!p.cu_seqlens) return;
    bos = sequence_start(p, n);
    length = sequence_start(p, n + 1) - bos;
    length = length > 0 ? length : 0;
}

// Row of a pool; -1 where there is nothing to read or write.
__device__ __forceinline__ int pool_row(const Tensor &table, int n, int64_t rows) {
    const int row = table ? load_index(table, n * table.stride[0]) : n;
    return row < rows ? row : -1;
}

__device__ __forceinline__ int read_row(const DeltaParams &p, int n) {
    return pool_row(p.read_indices, n, p.state_in ? p.P : p.N);
}

// How many segments a sequence has: an empty one has one too, which hands its state on.
__device__ __forceinline__ int segments_of(int length, int segment_tokens) {
    return length <= segment_tokens ? 1 : (length - 1) / segment_tokens + 1;
}

// Tokens of a segment: few enough for all segments to run at once, but not so few that the hops of the states from segment to
// segment take longest; kUncut where a cut does not pay. The transitions of a segment take about as long as its outputs, a hop
// nearly as long as a chunk, the launches and the first tiles kLaunchChunks chunks' time; segments of L chunks out of c cost
// 2 L + c / L, least at L^2 = c / 2.
constexpr int kUncut = INT32_MAX - 63, kLaunchChunks = 6, kMaxSlots = 96;

constexpr __host__ __device__ __forceinline__ int least_segment_chunks(int longest_chunks) {
    int least = 1;
    while (2 * least * least < longest_chunks) least++;
    return least;
}

constexpr __host__ __device__ __forceinline__ bool cut_pays(int segment_chunks, int longest_chunks) {
    return 2 * segment_chunks + (longest_chunks - 1) / segment_chunks + kLaunchChunks < longest_chunks;
}

// By a converged warp, for at most kMaxSlots sequences.
__device__ __forceinline__ int choose_segment_tokens(const KernelParams &params) {
    int chunks[kMaxSlots / 32], longest = 1;
#pragma unroll
    for (int i = 0; i < kMaxSlots / 32; i++) {
        const int n = 32 * i + threadIdx.x % 32;
        int bos, length = 0;
        if (n < static_cast<int>(params.p.N)) sequence_range(params.p, n, bos, length);
        chunks[i] = n < static_cast<int>(params.p.N) ? (length > kChunk ? (length - 1) / kChunk + 1 : 1) : 0;
        longest = chunks[i] > longest ? chunks[i] : longest;
    }
    longest = __reduce_max_sync(~0u, longest);
    int least = least_segment_chunks(longest), most = longest;  // `most` leaves N segments, which is few enough
    while (least < most) {
        const int middle = (least + most) / 2;
        int count = 0;
#pragma unroll
        for (int i = 0; i < kMaxSlots / 32; i++) count += (chunks[i] + middle - 1) / middle;
        if (__reduce_add_sync(~0u, count) <= params.slots)
            most = middle;
        else
            least = middle + 1;
    }
    return cut_pays(most, longest) ? most * kChunk : kUncut;
}

// Sequence and place in it of segment `index`, in the order of the sequences; sequence = N past the end. By a converged warp;
// the same in every lane.
__device__ __forceinline__ void find_segment(const DeltaParams &p, int segment_tokens, int index, int &sequence, int &within) {
    sequence = index;
    within = 0;
    if (segment_tokens == kUncut) return;
    const int N = static_cast<int>(p.N), lane = threadIdx.x % 32;
    int before = 0;  // segments of the sequences before this group of 32
    for (int first = 0; first < N; first += 32) {
        int count = 0, bos, length;
        if (first + lane < N) {
            sequence_range(p, first + lane, bos, length);
            count = segments_of(length, segment_tokens);
        }
        int through = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += other;
        }
        const uint32_t beyond = __ballot_sync(~0u, before + through > index);
        if (beyond != 0) {
            const int owner = __ffs(static_cast<int>(beyond)) - 1;
            sequence = first + owner;
            within = index - before - __shfl_sync(~0u, through - count, owner);
            return;
        }
        before += __shfl_sync(~0u, through, 31);
    }
    sequence = N;
}

// Pieces of one segment and head: V cut into CTAs, or N and M.
template <class C>
constexpr int kPieces = C::kOutputs ? C::D / C::kColumns : 2;

// Are the sequences taken in the order of their lengths? Only where there are more items than CTAs and not too many sequences.
template <class C>
__device__ __forceinline__ bool in_order(const KernelParams &params, const Smem<C> &smem) {
    return params.p.cu_seqlens && params.p.N <= kMaxSorted && smem.items > gridDim.x;
}

// The item of a CTA in a round over the grid, into shared memory, by all lanes of a warp alike. Items come with the longest
// sequences first, and every second round runs backwards, so that who had a long one gets a short one next.
template <class C>
__device__ __forceinline__ void find_item(const KernelParams &params, const Smem<C> &smem, uint32_t round, Item &item) {
    const DeltaParams &p = params.p;
    const uint32_t index = round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    item.exists = false;
    if (index >= smem.items) return;
    item.piece = index % kPieces<C>;
    const uint32_t HV = static_cast<uint32_t>(p.HV), pair = index / kPieces<C>;
    item.head = pair % HV;
    item.head_qk = item.head / (HV / static_cast<uint32_t>(p.H));
    item.segment = pair / HV;
    const int segment_tokens = smem.segment_tokens;
    int sequence, within, bos, length;
    find_segment(p, segment_tokens, item.segment, sequence, within);
    if (sequence >= p.N) return;
    if (in_order<C>(params, smem)) sequence = smem.order[sequence];
    sequence_range(p, sequence, bos, length);
    length -= within * segment_tokens;
    const bool first = within == 0, last = length <= segment_tokens;
    const int row = read_row(p, sequence);
    // A padding sequence computes nothing. Nobody needs the transition of a last segment, nor M of a first one, whose N starts
    // from the initial state.
    const bool unneeded = row < 0 || (!C::kOutputs && (last || (first && item.piece == 1)));
    item.sequence = sequence;
    item.batch = p.cu_seqlens ? 0 : sequence;
    item.bos = bos + within * segment_tokens;
    item.cleared = row < 0 && first ? length : 0;
    item.length = unneeded ? 0 : last ? length : segment_tokens;
    item.read_row = row;
    item.first = first;
    item.last = last;
    item.amplitude =
        p.A_log ? fminf(expf(load_scalar(p.A_log, item.head * p.A_log.stride[0])), 1e30f) : 1.0f;  // inf would make inf x 0
    item.bias = p.dt_bias ? load_scalar(p.dt_bias, item.head * p.dt_bias.stride[0]) : 0.0f;
    item.exists = true;
}

// The items of this CTA, for the roles that do not look for them. An item stays where it is until the next one is asked for, so
// that its numbers need not be kept in registers.
template <class C>
struct ItemReader {
    Smem<C> &smem;
    int number = -1;  // of the item held

    // By a converged warp. The item after the last one does not exist.
    __device__ __forceinline__ const Item &next() {
        __syncwarp();
        if (number >= 0 && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.item_ring().empty(number % kItemStages));
        number++;
        const RingState<kItemStages> slot{number % kItemStages, static_cast<uint32_t>(number / kItemStages) & 1};
        smem.item_ring().wait_full(slot);
        return smem.item[slot.stage];
    }
};

}  // namespace linattn::cuda::gdn
