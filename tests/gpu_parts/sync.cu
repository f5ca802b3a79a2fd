// Synchronisation: an mbarrier pipeline with setmaxnreg, named barriers, election, cluster ranks, programmatic dependent
// launch; and the walk over packed sequences.
#include "common/chunks.cuh"
#include "common/pipeline.cuh"
#include "parts.cuh"
#include "ptx/cta.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"

namespace parts {

using namespace linattn::ptx;
using linattn::cuda::Ring;
using linattn::cuda::RingState;

constexpr int kStages = 3, kTileWords = 512, kTileBytes = 4 * kTileWords;
constexpr int kAccumulators = 192;  // more than the 168 registers a thread of 384 starts with

// Warpgroup 0 copies tiles of 512 floats through a ring; warpgroups 1 and 2 fold each tile into 192 accumulators per thread:
//   x_j = tile[t + 128 j], j = 0..3;  acc[i] = acc[i] / 2 + x_{i mod 4} (i + 1) + w,  w the consumer's number. out [2,192,128].
__global__ void __launch_bounds__(384, 1) pipeline_kernel(const float *in, float *out, int tiles) {
    alignas(128) __shared__ float s_tiles[kStages][kTileWords];
    alignas(8) __shared__ uint64_t s_ring[Ring<kStages>::kBytes / 8];
    const Ring<kStages> ring = {shared_address(s_ring)};
    if (threadIdx.x == 0) ring.init(1, 2);
    __syncthreads();
    const int warpgroup = threadIdx.x / 128, t = threadIdx.x % 128;
    RingState<kStages> state;
    if (warpgroup == 0) {
        setmaxnreg_dec<40>();
        if (t == 0) {
            for (int i = 0; i < tiles; i++) {
                ring.wait_empty(state);
                mbarrier_arrive_expect_tx(ring.full(state.stage), kTileBytes);
                cp_async_bulk_load(shared_address(s_tiles[state.stage]), in + int64_t{i} * kTileWords, kTileBytes,
                                   ring.full(state.stage));
                state.advance();
            }
        }
    } else {
        setmaxnreg_inc<232>();
        const int consumer = warpgroup - 1;
        float acc[kAccumulators];
#pragma unroll
        for (int i = 0; i < kAccumulators; i++) acc[i] = 0.f;
        for (int c = 0; c < tiles; c++) {
            ring.wait_full(state);
            float x[4];
            for (int j = 0; j < 4; j++) x[j] = ld_shared_f32(shared_address(s_tiles[state.stage]) + 4 * (t + 128 * j));
            bar_sync(1 + consumer, 128);  // all of this warpgroup have read the tile
            if (t == 0) mbarrier_arrive(ring.empty(state.stage));
            state.advance();
#pragma unroll
            for (int i = 0; i < kAccumulators; i++) acc[i] = fmaf(acc[i], 0.5f, fmaf(x[i % 4], i + 1.f, consumer));
        }
#pragma unroll
        for (int i = 0; i < kAccumulators; i++) out[(consumer * kAccumulators + i) * 128 + t] = acc[i];
    }
}

// The ring over a cluster: warp 4 of every CTA fetches its share of each tile and multicasts it to all CTAs, and refills a
// stage once the consumers (warps 0-3) of all CTAs have handed it back. out [blocks, tiles, 512].
__global__ void __launch_bounds__(160) multicast_ring_kernel(const float *in, float *out, int tiles) {
    alignas(128) __shared__ float s_tiles[kStages][kTileWords];
    alignas(8) __shared__ uint64_t s_ring[Ring<kStages>::kBytes / 8];
    const Ring<kStages> ring = {shared_address(s_ring)};
    const uint32_t rank = cluster_ctarank(), size = cluster_nctarank();
    const int t = threadIdx.x;
    if (t == 0) ring.init(1, size);
    barrier_cluster_arrive_relaxed();
    barrier_cluster_wait();
    RingState<kStages> state;
    if (t >= 128) {
        if (elect_sync()) {
            const int piece = kTileWords / static_cast<int>(size);
            for (int i = 0; i < tiles; i++) {
                ring.wait_empty(state);
                mbarrier_arrive_expect_tx(ring.full(state.stage), kTileBytes);
                cp_async_bulk_load_multicast(shared_address(s_tiles[state.stage] + rank * piece),
                                             in + int64_t{i} * kTileWords + rank * piece, 4 * piece, ring.full(state.stage),
                                             static_cast<uint16_t>((1u << size) - 1));
                state.advance();
            }
        }
        __syncwarp();
    } else {
        for (int i = 0; i < tiles; i++) {
            ring.wait_full(state);
            for (int j = t; j < kTileWords; j += 128)
                out[(int64_t{blockIdx.x} * tiles + i) * kTileWords + j] = s_tiles[state.stage][j];
            bar_sync(1, 128);
            if (t < static_cast<int>(size)) mbarrier_arrive_cluster_release_cta(mapa(ring.empty(state.stage), t));
            state.advance();
        }
        __syncwarp();
    }
    barrier_cluster_arrive_relaxed();  // nobody leaves while a peer may still reach it
    barrier_cluster_wait();
}

enum NamedBarrier : uint32_t { kTileFull = 1, kTileEmpty = 2 };

// Warps 0-1 write, warps 2-3 read one 64-word tile, handed over by two named barriers of 128 threads: one side waits, the other
// only arrives. out [rounds,64] = value written in that round by thread 63 - i.
__global__ void __launch_bounds__(128) named_barrier_kernel(const uint32_t *in, uint32_t *out, int rounds) {
    __shared__ uint32_t s_tile[64];
    const int t = threadIdx.x % 64;
    if (threadIdx.x < 64) {
        for (int r = 0; r < rounds; r++) {
            bar_sync(kTileEmpty, 128);
            s_tile[t] = in[r * 64 + t];
            bar_arrive(kTileFull, 128);
        }
    } else {
        for (int r = 0; r < rounds; r++) {
            bar_arrive(kTileEmpty, 128);
            bar_sync(kTileFull, 128);
            out[r * 64 + t] = s_tile[63 - t];
        }
    }
}

// out[block][warp] = {ballot of the elected lanes, cluster rank, cluster size, parity checks passed}.
__global__ void identity_kernel(uint4 *out) {
    __shared__ uint64_t s_barrier;
    const uint32_t barrier = shared_address(&s_barrier);
    if (threadIdx.x == 0) mbarrier_init(barrier, blockDim.x);
    __syncthreads();
    uint32_t passed = !mbarrier_test_wait_parity(barrier, 0) && mbarrier_test_wait_parity(barrier, 1);
    __syncthreads();
    mbarrier_arrive(barrier);
    mbarrier_wait_parity(barrier, 0);
    passed += 2 * (mbarrier_try_wait_parity(barrier, 0) && !mbarrier_try_wait_parity(barrier, 1, 100));
    const uint32_t elected = __ballot_sync(~0u, elect_sync());
    if (threadIdx.x % 32 == 0)
        out[blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32] = {elected, cluster_ctarank(), cluster_nctarank(), passed};
}

// The first of two dependent grids: lets the second start at once, then takes its time.
__global__ void slow_writer_kernel(const uint32_t *in, uint32_t *middle, int count, int64_t cycles) {
    griddepcontrol_launch_dependents();
    const int64_t begin = clock64();
    while (clock64() - begin < cycles) {
    }
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) middle[i] = in[i] + 1;
}

__global__ void dependent_reader_kernel(const uint32_t *middle, uint32_t *out, int count) {
    griddepcontrol_wait();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) out[i] = middle[i];
}

// out[index] = {i_n, i_c, start, length} of chunk `index`, one warp each.
template <int kChunk>
__global__ void chunks_kernel(linattn::cuda::Sequences sequences, int64_t *out) {
    const linattn::cuda::Chunk c = linattn::cuda::find_chunk<kChunk>(sequences, blockIdx.x);
    const int64_t value = threadIdx.x == 0 ? c.i_n : threadIdx.x == 1 ? c.i_c : threadIdx.x == 2 ? c.start : c.length;
    if (threadIdx.x < 4) out[int64_t{blockIdx.x} * 4 + threadIdx.x] = value;
}

}  // namespace parts

using linattn::cuda::launch;
using linattn::cuda::LaunchConfig;
using parts::guarded;

PARTS_API int parts_pipeline(const float *in, float *out, int tiles) {
    return guarded([&] {
        LaunchConfig config;
        config.block = {384};
        launch("pipeline_kernel", parts::pipeline_kernel, config, in, out, tiles);
    });
}

PARTS_API int parts_multicast_ring(const float *in, float *out, int clusters, int size, int tiles) {
    return guarded([&] {
        LaunchConfig config;
        config.grid = {clusters * size};
        config.block = {160};
        config.cluster = {size};
        launch("multicast_ring_kernel", parts::multicast_ring_kernel, config, in, out, tiles);
    });
}

PARTS_API int parts_named_barrier(const uint32_t *in, uint32_t *out, int rounds) {
    return guarded([&] {
        LaunchConfig config;
        config.block = {128};
        launch("named_barrier_kernel", parts::named_barrier_kernel, config, in, out, rounds);
    });
}

PARTS_API int parts_identity(void *out, int blocks, int cluster, int threads) {
    return guarded([&] {
        LaunchConfig config;
        config.grid = {blocks};
        config.block = {threads};
        config.cluster = {cluster};
        launch("identity_kernel", parts::identity_kernel, config, static_cast<uint4 *>(out));
    });
}

PARTS_API int parts_dependent_launch(const uint32_t *in, uint32_t *middle, uint32_t *out, int count, int64_t cycles) {
    return guarded([&] {
        cudaStream_t stream;
        linattn::cuda::check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        LaunchConfig config;
        config.grid = {4};
        config.block = {128};
        config.stream = stream;
        launch("slow_writer_kernel", parts::slow_writer_kernel, config, in, middle, count, cycles);
        config.programmatic = true;
        launch("dependent_reader_kernel", parts::dependent_reader_kernel, config, middle, out, count);
        linattn::cuda::check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        linattn::cuda::check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
    });
}

PARTS_API int parts_chunks(const void *cu_seqlens, int is_int64, int64_t N, int64_t T, int chunk, int64_t count, int64_t *out) {
    return guarded([&] {
        LaunchConfig config;
        config.grid = {count};
        config.block = {32};
        const linattn::cuda::Sequences sequences = {cu_seqlens, is_int64 != 0, N, T};
        launch("chunks_kernel", chunk == 64 ? parts::chunks_kernel<64> : parts::chunks_kernel<16>, config, sequences, out);
    });
}

PARTS_API int64_t parts_max_chunks(int packed, int64_t N, int64_t T, int chunk) {
    return chunk == 64 ? linattn::cuda::max_chunks<64>(packed != 0, N, T) : linattn::cuda::max_chunks<16>(packed != 0, N, T);
}
