// The work of a gdn launch, cut on the device from cu_seqlens: one item is a segment of one sequence, one value head and the
// columns of V of a CTA.
#pragma once
#include "common/sequences.cuh"
#include "shared.cuh"

namespace linattn::cuda::gdn {

struct Prepared;  // prepared.cuh

struct KernelParams {
    DeltaParams p;
    int middles;                     // segments that are neither first nor last, all sequences', which run at once; 0: no cut
    Part part;                       // of the Outputs pass
    float *g_segments;               // [slots(p)][HV][kSlotFloats]: the state before the segment; its M (common/join.cuh)
    int *g_segment_tokens;           // what was chosen
    float scale, lower_bound;        // of p, in float
    int multiprocessors;             // of the device
    Prepared *g_prepared = nullptr;  // [chunks][HV], or nothing is prepared
    int *g_precise = nullptr;        // [chunks][HV], first_precise of each
    int prepare_heads = 0;           // value heads that a CTA prepares, one after another
};

// Places in the workspace: every segment but the first of each sequence.
__host__ __device__ __forceinline__ int slots(const KernelParams &params) {
    return params.middles + static_cast<int>(params.p.N);
}

struct TensorMaps {
    CUtensorMap q, k, v, o;
};

// In gdn_fwd.cuh, compiled for each Config in the gdn_fwd_*.cu.
template <class C>
void launch_fwd(const KernelParams &params, const TensorMaps &maps, int multiprocessors);
template <class C>
void launch_prepare(const KernelParams &params, const TensorMaps &maps, int64_t chunks);  // prepare.cuh

// How many segments a sequence has: an empty one has one too, which hands its state on.
__device__ __forceinline__ int segments_of(int length, int segment_tokens) {
    return length <= segment_tokens ? 1 : (length - 1) / segment_tokens + 1;
}

// Tokens of a segment: few enough for all segments to run at once, but not so few that the hops of the states from segment to
// segment take longest; kUncut where a cut does not pay. First segments and the transitions of the middle ones take about as
// long as the later segments' outputs, a hop nearly as long as a chunk, the launches and the first tiles kLaunchChunks chunks'
// time; segments of L chunks out of c cost 2 L + c / L, least at L^2 = c / 2.
constexpr int kUncut = INT32_MAX - 63, kLaunchChunks = 18, kMaxCutSequences = 96;

constexpr __host__ __device__ __forceinline__ int least_segment_chunks(int longest_chunks) {
    int least = 1;
    while (2 * least * least < longest_chunks) least++;
    return least;
}

constexpr __host__ __device__ __forceinline__ bool cut_pays(int segment_chunks, int longest_chunks) {
    return 2 * segment_chunks + (longest_chunks - 1) / segment_chunks + kLaunchChunks < longest_chunks;
}

// By a converged warp, for at most kMaxCutSequences sequences.
__device__ __forceinline__ int choose_segment_tokens(const KernelParams &params) {
    int chunks[kMaxCutSequences / 32], longest = 1;
#pragma unroll
    for (int i = 0; i < kMaxCutSequences / 32; i++) {
        const int n = 32 * i + threadIdx.x % 32;
        int bos, length = 0;
        if (n < static_cast<int>(params.p.N)) sequence_range(params.p, n, bos, length);
        chunks[i] = length > kChunk ? (length - 1) / kChunk + 1 : 1;
        longest = chunks[i] > longest ? chunks[i] : longest;
    }
    longest = __reduce_max_sync(~0u, longest);
    int least = least_segment_chunks(longest), most = longest;  // `most` leaves no middle segments, which is few enough
    while (least < most) {
        const int length = (least + most) / 2;
        int count = 0;
#pragma unroll
        for (int i = 0; i < kMaxCutSequences / 32; i++) {
            const int segments = (chunks[i] + length - 1) / length;
            count += segments > 2 ? segments - 2 : 0;
        }
        if (__reduce_add_sync(~0u, count) <= params.middles)
            most = length;
        else
            least = length + 1;
    }
    return cut_pays(most, longest) ? most * kChunk : kUncut;
}

// Pass::Either: do CTAs of 64 columns have done sooner than those of 128? Where one sequence is as long as many others together, it
// is what all wait for. By a converged warp; the same in every lane, CTA and kernel.
__device__ __forceinline__ bool halves_are_faster(const KernelParams &params) {
    constexpr float kWhole = 2.5f, kHalf = 1.6f, kSure = 1.1f;  // us a chunk
    int longest = 0, total = 0;
    for (int n = threadIdx.x % 32; n < static_cast<int>(params.p.N); n += 32) {
        int bos, length;
        sequence_range(params.p, n, bos, length);
        const int chunks = (length + kChunk - 1) / kChunk;
        longest = chunks > longest ? chunks : longest;
        total += chunks;
    }
    const float most = static_cast<float>(__reduce_max_sync(~0u, longest));
    const float share = static_cast<float>(__reduce_add_sync(~0u, total)) * static_cast<float>(params.p.HV) /
                        static_cast<float>(params.multiprocessors);
    return kSure * kHalf * fmaxf(most, 2.0f * share) < kWhole * fmaxf(most, share);
}

// Segment `index` of those that a pass has, in the order of the sequences, and its place in the workspace. Sequences have
// `fewer` segments less in this pass, the first of them among those. sequence = N past the end. By a converged warp; the same
// in every lane.
__device__ __forceinline__ void find_segment(const DeltaParams &p, int segment_tokens, int fewer, int index, int &sequence,
                                             int &within, int &slot) {
    const int N = static_cast<int>(p.N), lane = threadIdx.x % 32;
    int before = 0, slots_before = 0;  // of the sequences before this group of 32
    for (int first = 0; first < N; first += 32) {
        int segments = 1, bos, length;
        if (first + lane < N) {
            sequence_range(p, first + lane, bos, length);
            segments = segments_of(length, segment_tokens);
        }
        const int count = segments > fewer ? segments - fewer : 0;
        int through = count, slots_through = segments - 1;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, through, step), other_slots = __shfl_up_sync(~0u, slots_through, step);
            if (lane >= step) through += other, slots_through += other_slots;
        }
        const uint32_t beyond = __ballot_sync(~0u, before + through > index);
        if (beyond != 0) {
            const int owner = __ffs(static_cast<int>(beyond)) - 1;
            sequence = first + owner;
            within = 1 + index - before - __shfl_sync(~0u, through - count, owner);
            slot = slots_before + __shfl_sync(~0u, slots_through - (segments - 1), owner) + within - 1;
            return;
        }
        before += __shfl_sync(~0u, through, 31);
        slots_before += __shfl_sync(~0u, slots_through, 31);
    }
    sequence = N;
}

// Place in the workspace of the state before the second segment of a sequence. By a converged warp.
__device__ __forceinline__ int first_slot(const DeltaParams &p, int segment_tokens, int sequence) {
    int before = 0;
    for (int first = 0; first < sequence; first += 32) {
        const int n = first + threadIdx.x % 32;
        int bos, length = 0;
        if (n < sequence) sequence_range(p, n, bos, length);
        before += segments_of(length, segment_tokens) - 1;
    }
    return __reduce_add_sync(~0u, before);
}

// Chunks of the sequences before one. By a converged warp.
__device__ __forceinline__ int chunks_before(const DeltaParams &p, int sequence) {
    if (!p.cu_seqlens) return sequence * ((static_cast<int>(p.T) + kChunk - 1) / kChunk);
    int before = 0;
    for (int n = threadIdx.x % 32; n < sequence; n += 32) {
        int bos, length;
        sequence_range(p, n, bos, length);
        before += (length + kChunk - 1) / kChunk;
    }
    return __reduce_add_sync(~0u, before);
}

// Pieces of one segment and head: V cut into CTAs, or N and M.
template <class C>
constexpr int kPieces = C::kOutputs ? C::D / C::kColumns : 2;

// Are the sequences taken in the order of their lengths? Only where there are more items than CTAs and not too many sequences.
template <class C>
__device__ __forceinline__ bool in_order(const KernelParams &params, const Smem<C> &smem) {
    return params.p.cu_seqlens && params.part == Part::Whole && params.p.N <= kMaxSorted && smem.items > gridDim.x;
}

// The item of a CTA in a round over the grid, found by a converged warp, whose lane 0 puts it into shared memory. Items come with the longest
// sequences first, and every second round runs backwards, so that who had a long one gets a short one next.
template <class C>
__device__ __forceinline__ void find_item(const KernelParams &params, const Smem<C> &smem, uint32_t round, Item &item) {
    const DeltaParams &p = params.p;
    const uint32_t index = round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    const bool leader = threadIdx.x % 32 == 0;
    if (leader) item.exists = false;
    if (index >= smem.items) return;
    const uint32_t HV = static_cast<uint32_t>(p.HV), pair = index / kPieces<C>;
    const int head = pair % HV;
    const int segment_tokens = smem.segment_tokens;
    int sequence = pair / HV, within = 0, slot = 0, bos, length;
    if (!C::kOutputs || params.part == Part::Later) {
        find_segment(p, segment_tokens, C::kOutputs ? 1 : 2, sequence, sequence, within, slot);
        if (sequence >= p.N) return;
    } else if (params.part == Part::First) {
        slot = first_slot(p, segment_tokens, sequence);
    } else if (in_order<C>(params, smem)) {
        sequence = smem.order[sequence];
    }
    sequence_range(p, sequence, bos, length);
    length -= within * segment_tokens;
    int prepared = 0;
    if constexpr (C::kPrepared) prepared = chunks_before(p, sequence) + within * segment_tokens / kChunk;
    const bool first = within == 0, last = length <= segment_tokens;
    const int row = read_row(p, sequence);
    if (!leader) return;
    item.piece = index % kPieces<C>;
    item.head = head;
    item.head_qk = head / (HV / static_cast<uint32_t>(p.H));
    item.slot = slot;
    item.sequence = sequence;
    item.batch = p.cu_seqlens ? 0 : sequence;
    item.before = within * segment_tokens;
    item.prepared = prepared;
    item.bos = bos + item.before;
    item.cleared = row < 0 && first ? length : 0;
    item.length = row < 0 ? 0 : last ? length : segment_tokens;  // a padding sequence computes nothing
    item.read_row = row;
    item.first = first;
    item.last = last;
    item.amplitude =
        p.A_log ? fminf(expf(load_scalar(p.A_log, head * p.A_log.stride[0])), 1e30f) : 1.0f;  // inf would make inf x 0
    item.bias = p.dt_bias ? load_scalar(p.dt_bias, head * p.dt_bias.stride[0]) : 0.0f;
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
        if (number >= 0) warp_arrive(smem.item_ring().empty(number % kItemStages), threadIdx.x % 32);
        number++;
        const RingState<kItemStages> slot{number % kItemStages, static_cast<uint32_t>(number / kItemStages) & 1};
        smem.item_ring().wait_full(slot);
        return smem.item[slot.stage];
    }
};

}  // namespace linattn::cuda::gdn
