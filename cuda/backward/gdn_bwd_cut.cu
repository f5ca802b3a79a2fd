// Between the first and the second kernel of the chunked GDN backward: how long sequences of few heads are cut (gdn_bwd_cut.cuh); and
// the join of their segments. One CTA per sequence and head; per sequence, head, direction and 8 columns of V.
#include "common/launch.h"
#include "gdn_bwd.cuh"
#include "gdn_bwd_join.cuh"

namespace linattn::cuda::gdn_bwd {

constexpr int kCutThreads = 512;
constexpr float kForgotten = -41.0f;  // log2 of a bound of |M|; 2^-40 with room for the rounding of its sum

// Costs in eighths of a chunk's time in the scan: a chunk; a hop of the join; the join and the second launch, with what they load
// first; what a scan loads first. And the chunks of a sequence below which nothing pays, this file's two launches included.
constexpr int kChunkCost = 8, kHopCost = 10, kJoinCost = 64, kStartCost = 16, kLeastCutChunks = 32;
constexpr int kUsualSilence = 10;  // chunks that forget, where gates are not known yet

__host__ __device__ constexpr int segments_of(int chunks, int segment) {
    return chunks <= segment ? 1 : (chunks - 1) / segment + 1;
}
// Clusters of the first launch for a sequence of so many segments: N, N' and M of those between.
__host__ __device__ constexpr int first_items(int segments, int directions) {
    return segments == 1 ? directions : directions + (directions + 1) * (segments - 2);
}

// Chunks of a segment, and what the whole then takes.
struct Choice {
    int exact, cost, forgetting;
};

// Chunks' time of clusters with so many chunks in all, of which the longest has that many.
__device__ __forceinline__ int time_of(int clusters, int work, int longest, int streams) {
    return clusters <= streams ? longest : longest + work / streams;
}

// By a converged warp, the same in every lane; lane n has the chunks of sequence n, and tries segments of a part in n + 1 of the longest.
__device__ __forceinline__ Choice choose(int own, int N, int directions, int streams, int room) {
    const int lane = threadIdx.x % 32;
    const int longest = max(__reduce_max_sync(~0u, own), 1), segment = (longest + lane) / (lane + 1);
    int first = 0, later = 0, work = 0, forgetting = 0, forgetting_work = 0;
    for (int m = 0; m < N; m++) {
        const int chunks = __shfl_sync(~0u, own, m), segments = segments_of(chunks, segment);
        first += first_items(segments, directions), later += directions * (segments - 1);
        work += segments == 1    ? directions * chunks
                : directions > 1 ? chunks + 2 * (segments - 2) * segment
                                 : (1 + 2 * (segments - 2)) * segment;
        forgetting += directions * segments, forgetting_work += directions * (chunks + (segments - 1) * kUsualSilence);
    }
    // The lane with the least cost, of equal ones that with the fewest segments; one segment each always fits.
    const auto least = [&](bool fits, int cost) {
        const int key = min(cost, (1 << 25) - 1) * 32 + lane;
        return -__reduce_max_sync(~0u, fits ? -key : INT32_MIN + 1) % 32;
    };
    const int of_longest = segments_of(longest, segment), once = time_of(first, work, segment, streams);
    const int cost = kChunkCost * once + (of_longest == 1 ? 0 : kChunkCost * segment + kHopCost * (of_longest - 2) + kJoinCost);
    const int best = least(first <= room && later <= streams, cost);
    Choice choice = {__shfl_sync(~0u, segment, best), __shfl_sync(~0u, cost, best), 0};
    int places = 0;
    for (int m = 0; m < N; m++) {
        const int chunks = __shfl_sync(~0u, own, m);
        places += max(directions * segments_of(chunks, segment), first_items(segments_of(chunks, choice.exact), directions));
    }
    const int most = least(places <= room, time_of(forgetting, forgetting_work, segment + kUsualSilence, streams));
    choice.forgetting = __shfl_sync(~0u, segment, most);
    return choice;
}

struct CutSmem {
    int silent[2][32];  // of the scan that starts behind the boundary; in reverse
};

// A sequence and head, cut.
struct Cutting {
    const Call &call;
    const CutSmem &smem;
    int n, head, chunks, segment, segments, slot, identity;  // slot: that of the state before segment 1
    bool forgetting;

    // Place of the state before segment s > 0; of D after segment s < segments - 1. The segment's M comes next.
    __device__ __forceinline__ int before(int s) const { return 2 * (slot + 2 * (s - 1)); }
    __device__ __forceinline__ int after(int s) const { return 2 * (slot + 2 * (segments - 2 - s) + 1); }
    // Segment s as the scan gives it out, from there.
    __device__ __forceinline__ ScanItem given_out(int s, bool reverse, int silent, int from) const {
        const int begin = s * segment, end = min(begin + segment, chunks);
        const int to = s == (reverse ? 0 : segments - 1) ? kGiven : kNothing;
        return {n, head, reverse ? begin : begin - silent, end - begin + silent, silent, from, to, kNothing, reverse, false};
    }
    __device__ __forceinline__ ScanItem first(int i) const {
        const ScanItem none = {-1};
        const int directions = call.cut.directions;
        const bool reverse = reverse_of(i);
        if (chunks == 0 && i != directions - 1) return none;  // it hands its state on
        if (forgetting || segments == 1) {
            const int s = i / directions;
            if (s >= segments) return none;
            const bool at_end = s == (reverse ? segments - 1 : 0);
            const int silent = at_end ? 0 : reverse ? smem.silent[1][s] : smem.silent[0][s - 1];
            ScanItem item = given_out(s, reverse, silent, kGiven);
            if (reverse ? item.begin + item.chunks < chunks : item.begin > 0) item.from = kNothing;
            return item;
        }
        if (i < directions) {
            ScanItem item = given_out(reverse ? segments - 1 : 0, reverse, 0, kGiven);
            item.to = reverse ? after(segments - 2) : before(1);
            return item;
        }
        const int of_middle = (i - directions) % (directions + 1), s = (i - directions) / (directions + 1) + 1;
        const int begin = s * segment;
        if (s >= segments - 1) return none;
        if (of_middle == directions)
            return {n, head, begin, segment, segment, identity, before(s) + 1, after(s) + 1, false, true};
        return (directions == 2 ? of_middle == 0 : reverse)
                   ? ScanItem{n, head, begin, segment, segment, kNothing, after(s - 1), kNothing, true, false}
                   : ScanItem{n, head, begin, segment, segment, kNothing, before(s + 1), kNothing, false, false};
    }
    __device__ __forceinline__ bool reverse_of(int i) const {
        return call.cut.directions == 2 ? i % 2 : call.part == Part::Reverse;
    }
    __device__ __forceinline__ ScanItem later(int i) const {
        const int s = i / call.cut.directions;
        if (forgetting || s >= segments - 1) return {-1};
        return reverse_of(i) ? given_out(s, true, 0, after(s)) : given_out(s + 1, false, 0, before(s + 1));
    }
};

__global__ void __launch_bounds__(kCutThreads) gdn_bwd_cut_kernel(const __grid_constant__ Call call) {
    extern __shared__ __align__(1024) char smem_bytes[];
    CutSmem &smem = *reinterpret_cast<CutSmem *>(smem_bytes);
    const BwdParams &p = call.p();
    const int lane = threadIdx.x % 32, N = static_cast<int>(p.N), HV = static_cast<int>(p.HV), directions = call.cut.directions,
              streams = call.cut.streams, room = call.cut.room;
    const int n = blockIdx.x / HV, head = blockIdx.x % HV;
    ptx::griddepcontrol_launch_dependents();
    // Lengths are the caller's, so all of this need not wait for the kernels before.
    const int own = lane < N ? (make_item(p, lane, 0, 0).length + kC - 1) / kC : 0;
    const Choice choice = choose(own, N, directions, streams, room);
    // Places of the items and slots: those of the sequences before come first.
    int place = 0, later_place = 0, first_chunk = 0;
    for (int m = 0; m < n; m++) {
        const int chunks = __shfl_sync(~0u, own, m), exact = segments_of(chunks, choice.exact);
        place += max(directions * segments_of(chunks, choice.forgetting), first_items(exact, directions));
        later_place += directions * (exact - 1), first_chunk += chunks;
    }
    const int chunks = __shfl_sync(~0u, own, n);
    const int exact = segments_of(chunks, choice.exact), forgetting = segments_of(chunks, choice.forgetting);
    const int places = max(directions * forgetting, first_items(exact, directions)), later_places = directions * (exact - 1);

    const int slot = head * call.cut.slots_a_head() + later_place / directions * 2, identity = 2 * HV * call.cut.slots_a_head();
    const int D = static_cast<int>(p.K);
    float *of_identity = call.state_at(identity);
    for (int i = blockIdx.x * kCutThreads + threadIdx.x; i < D * D; i += gridDim.x * kCutThreads)
        of_identity[i] = i % (D + 1) == 0 ? 1.0f : 0.0f;
    ptx::griddepcontrol_wait();

    // How many chunks beside each boundary forget all of what lies beyond? No more than make the whole faster.
    const int cost = exact > 1 ? min(choice.cost, kChunkCost * chunks) : kChunkCost * chunks;
    const int most = (cost - kStartCost) / kChunkCost - choice.forgetting;
    for (int i = threadIdx.x / 32; i < 2 * (forgetting - 1); i += kCutThreads / 32) {
        const bool reverse = i % 2;
        const int boundary = (i / 2 + 1) * choice.forgetting, beyond = reverse ? chunks - boundary : boundary;
        float sum = 0.0f;  // log2 of the bound
        int silent = -1;
        for (int at = 0; at < min(beyond, most) && silent < 0; at += 32) {
            float bound = 0.0f;
            if (at + lane < beyond) {
                const int chunk = reverse ? boundary + at + lane : boundary - 1 - at - lane;
                bound = call.factors[call.of_value(first_chunk + chunk, head)].log2_of_bound();
            }
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const float other = __shfl_up_sync(~0u, bound, step);
                if (lane >= step) bound += other;
            }
            const uint32_t there = __ballot_sync(~0u, at + lane < beyond && sum + bound <= kForgotten);
            if (there != 0) silent = at + __ffs(static_cast<int>(there));
            sum += __shfl_sync(~0u, bound, 31);
        }
        if (silent < 0) silent = beyond;  // from where the sequence begins or ends
        if (lane == 0) smem.silent[reverse][i / 2] = silent <= most ? silent : -1;
    }
    __syncthreads();
    bool forgets = forgetting > 1;
    for (int s = 0; s < forgetting - 1; s++) forgets = forgets && smem.silent[0][s] >= 0 && smem.silent[1][s] >= 0;

    const Cutting cutting = {
        call, smem,     n,      head, chunks, forgets ? choice.forgetting : choice.exact, forgets ? forgetting : exact,
        slot, identity, forgets};
    const bool few = chunks > 0 && make_item(p, n, head, 0).length <= kFewTokens;  // the kernels in float do those
    const ScanItem none = {-1};
    ScanItem *first = call.cut.first + head * room, *later = call.cut.later + head * room;
    const bool last = n == N - 1;  // it clears what nobody has
    for (int i = threadIdx.x; i < (last ? room - place : places); i += kCutThreads)
        first[place + i] = i < places && !few ? cutting.first(i) : none;
    for (int i = threadIdx.x; i < (last ? room - later_place : later_places); i += kCutThreads)
        later[later_place + i] = i < later_places ? cutting.later(i) : none;
    if (threadIdx.x == 0) call.cut.join[blockIdx.x] = {slot, forgets || exact < 3 ? 0 : exact - 2};
}

template <int D>
__global__ void __launch_bounds__(2 * D) gdn_bwd_join_kernel(const __grid_constant__ Call call) {
    extern __shared__ __align__(1024) char smem_bytes[];
    delta_bwd::after_those_before();
    constexpr int kSlices = D / kJoinColumns;
    const int slice = blockIdx.x % kSlices, reverse = blockIdx.x / kSlices % 2;
    const JoinItem item = call.cut.join[blockIdx.x / kSlices / 2];
    if (item.hops > 0 && (call.part == Part::Whole || reverse == (call.part == Part::Reverse)))
        join_segments(*reinterpret_cast<JoinSmem<D> *>(smem_bytes), call.state_at(2 * (item.slot + reverse)), 4 * D * D,
                      item.hops, slice);
}

// Clusters that a head may have at once, or 0 where nothing is cut: not even two segments of each sequence's scans would run at
// once, nor is a pack, whose lengths are on the device, so long that there may be work for them.
int cut_streams(const BwdParams &p, int directions, int multiprocessors) {
    if (p.splits == 1 || p.N < 1 || p.N > kMaxCutSequences || p.HV < 1 || p.T < kLeastCutChunks * kC) return 0;
    const int64_t streams = multiprocessors / (p.HV * (p.V / 64));
    const bool long_pack = p.cu_seqlens && streams >= 2 * directions && p.T >= p.N * kLeastCutChunks * kC;
    return streams >= directions * (p.N + 1) || long_pack ? static_cast<int>(streams) : 0;
}

static LaunchConfig config_of(const BwdParams &p, int64_t blocks, int64_t threads, int64_t smem_bytes) {
    LaunchConfig config;
    config.grid.x = blocks, config.block.x = threads, config.smem_bytes = smem_bytes;
    config.stream = static_cast<cudaStream_t>(p.stream);
    config.programmatic = true;
    return config;
}

void launch_cut(const Call &call) {
    const BwdParams &p = call.exact.p;
    launch("gdn_bwd_cut_kernel", gdn_bwd_cut_kernel, config_of(p, p.N * p.HV, kCutThreads, sizeof(CutSmem)), call);
}

template <int D>
static void launch_join_of(const Call &call) {
    const BwdParams &p = call.exact.p;
    launch("gdn_bwd_join_kernel", gdn_bwd_join_kernel<D>,
           config_of(p, p.N * p.HV * 2 * (D / kJoinColumns), 2 * D, sizeof(JoinSmem<D>)), call);
}
void launch_join(const Call &call) { call.exact.p.K == 128 ? launch_join_of<128>(call) : launch_join_of<64>(call); }

}  // namespace linattn::cuda::gdn_bwd
