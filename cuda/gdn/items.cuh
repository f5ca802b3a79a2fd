// The work of a gdn launch, cut on the device from cu_seqlens: one item is a segment of one sequence, one value head and the
// columns of V of a CTA.
#pragma once
#include "shared.cuh"

namespace linattn::cuda::gdn {

struct KernelParams {
    DeltaParams p;
    int slots;          // segments of all sequences together that run at once, N at least; 0: sequences are never cut
    float *g_segments;  // [slots][HV][2][D][D], V-first: N, then the state before the segment; M
    float scale;
};

struct TensorMaps {
    CUtensorMap q, k, v, o;
};

// In gdn_fwd.cuh, compiled for each Config in the gdn_fwd_*.cu.
template <class C>
void launch_fwd(const KernelParams &params, const TensorMaps &maps, int multiprocessors);

struct Item {
    int sequence, head, batch, segment;
    int bos, length;   // first token, in the row of B, and tokens
    int piece;         // Outputs: columns 64 or 128 piece ..; Transition: 0 for N, 1 for M
    bool first, last;  // segment of its sequence; both: the sequence is whole
    bool exists;
    __device__ __forceinline__ int chunks() const { return (length + kChunk - 1) / kChunk; }
};

__device__ __forceinline__ int load_index(const Tensor &t, int64_t at) {
    const int64_t value =
        t.dtype == DType::I32 ? reinterpret_cast<const int32_t *>(t.data)[at] : reinterpret_cast<const int64_t *>(t.data)[at];
    return value < -1 ? -1 : value > INT32_MAX ? INT32_MAX : static_cast<int>(value);
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

// Sum over all sequences of their segments, and the longest one's tokens. By a converged warp.
__device__ __forceinline__ int count_segments(const DeltaParams &p, int segment_tokens, int &longest) {
    int count = 0;
    longest = 0;
    for (int n = threadIdx.x % 32; n < static_cast<int>(p.N); n += 32) {
        int bos, length;
        sequence_range(p, n, bos, length);
        count += segments_of(length, segment_tokens);
        longest = length > longest ? length : longest;
    }
    longest = __reduce_max_sync(~0u, longest);
    return __reduce_add_sync(~0u, count);
}

// Tokens of a segment, the same in every CTA and kernel of a call: the least multiple of 64 with which all segments run at once,
// or everything where that does not pay. A cut costs the transitions, about 1.3 times a segment's own time, and the hops of the
// states from segment to segment, about the time of kHopChunks chunks in all.
constexpr int kUncut = INT32_MAX - 63;
constexpr int kHopChunks = 12;
__device__ __forceinline__ int choose_segment_tokens(const KernelParams &params) {
    if (params.slots == 0) return kUncut;
    int longest, unused;
    count_segments(params.p, kUncut, longest);
    int least = 1, most = (longest + kChunk - 1) / kChunk;  // chunks; `most` leaves N segments, which is few enough
    const int chunks = most;
    while (least < most) {
        const int middle = (least + most) / 2;
        if (count_segments(params.p, middle * kChunk, unused) <= params.slots)
            most = middle;
        else
            least = middle + 1;
    }
    return 2.3f * most + kHopChunks < chunks ? most * kChunk : kUncut;
}

// Sequence and place in it of segment `index`, in the order of the sequences; sequence = N past the end. By a converged warp; the
// same in every lane.
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

template <class C>
__device__ __forceinline__ Item make_item(const KernelParams &params, int segment_tokens, uint32_t index) {
    const DeltaParams &p = params.p;
    Item item;
    item.piece = index % kPieces<C>;
    const uint32_t HV = static_cast<uint32_t>(p.HV), pair = index / kPieces<C>;
    item.head = pair % HV;
    item.segment = pair / HV;
    int within;
    find_segment(p, segment_tokens, item.segment, item.sequence, within);
    item.exists = item.sequence < p.N;
    item.length = 0;
    item.first = within == 0;
    if (!item.exists) return item;
    sequence_range(p, item.sequence, item.bos, item.length);
    item.batch = p.cu_seqlens ? 0 : item.sequence;
    item.bos += within * segment_tokens;
    item.length -= within * segment_tokens;
    item.last = item.length <= segment_tokens;
    item.length = item.last ? item.length : segment_tokens;
    // A padding sequence computes nothing. Nobody needs the transition of a last segment, nor M of a first one, whose N starts
    // from the initial state.
    if (read_row(p, item.sequence) < 0) item.length = 0;
    if (!C::kOutputs && (item.last || (item.first && item.piece == 1))) item.length = 0;
    return item;
}

}  // namespace linattn::cuda::gdn
