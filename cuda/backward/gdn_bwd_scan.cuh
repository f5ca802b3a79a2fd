// What the two scans of the chunked GDN backward share: that of gdn_bwd_scan.cu, where the whole is told, and that of
// gdn_bwd_outputs.cu, which gives the forward's outputs too (kOutputs) and walks forwards alone:
//
//   o = scale 2^G / |q| q S + P (beta e)
#pragma once
#include "gdn_bwd_scan_parts.cuh"

namespace linattn::cuda::gdn_bwd {

template <class C, bool kOutputs>
struct Scan : ScanParts<C, kOutputs> {
    using Parts = ScanParts<C, kOutputs>;
    using Parts::call, Parts::smem, Parts::job, Parts::ring, Parts::D, Parts::kSteps;
    using Parts::chunk_at, Parts::unit, Parts::factor, Parts::factors, Parts::pack_scaled, Parts::load_transposed,
        Parts::stage_rows, Parts::stage_state, Parts::when_free, Parts::staged, Parts::give_back;
    using typename Parts::T, typename Parts::Rows, typename Parts::Half, typename Parts::Square;

    // S, before the chunk, becomes S after it. Barriers are waited for where no product is under way, and S is
    // scaled where it is: elsewhere ptxas serialises the products.
    __device__ __forceinline__ void forward(float (&S)[D / 2], const ScanStage<C> &stage, int place) const {
        float e[32];
        uint32_t state[kSteps][4], a[4][4];
        pack<Operand>(state, S);
        register_fence(state);
        float2 fade[8], beta[8];
        when_free(place);
        issue_with<ptx::Major::K, Rows>(e, state, Rows::k_major_low(ptx::shared_address(stage.k), 0, 0), false, [&](int s) {
            if (s < 4) load_transposed(a[s], ptx::shared_address(stage.x), s);
            stage_state(state[s], place, s);
        });
        factors(fade, stage.f.fade), factors(beta, stage.f.beta);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(e), register_fence(state);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 f = fade[j];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 v = unpack(Operand{}, a[j / 2][j % 2 * 2 + half]);
                e[4 * j + 2 * half] = fmaf(f.x, e[4 * j + 2 * half], v.x);
                e[4 * j + 2 * half + 1] = fmaf(f.y, e[4 * j + 2 * half + 1], v.y);
            }
        }
        pack_scaled(a, e, beta);
        factors(beta, stage.f.write);
        register_fence(a), ptx::register_fence(e);
        issue<Operand, ptx::Major::K, Square>(e, a, Square::k_major_low(ptx::shared_address(stage.solve), 0, 0), true);
        const float decay = stage.f.decay;
#pragma unroll
        for (int i = 0; i < D / 2; i++) S[i] *= decay;
        ptx::register_fence(S);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(e), register_fence(a);
        pack_scaled(a, e, beta);
        register_fence(a), ptx::register_fence(S);
        issue_with<ptx::Major::MN, Rows>(S, a, Rows::mn_major_low(ptx::shared_address(stage.k), 0, 0), true,
                                         [&](int s) { stage_rows(e, place, s); });
        staged(place);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(S), register_fence(a);
    }

    // The same with outputs, which go where v was; to_caller: from the unit of v.
    __device__ __forceinline__ void forward_with_outputs(float (&S)[D / 2], float to_caller, const ScanStage<C> &stage,
                                                         int place) const {
        float e[32], o[32];
        uint32_t state[kSteps][4], a[4][4], written[4][4];
        pack<Operand>(state, S);
        register_fence(state);
        float2 fade[8], beta[8];
        when_free(place);
        issue_with<ptx::Major::K, Rows>(e, state, Rows::k_major_low(ptx::shared_address(stage.k), 0, 0), false, [&](int s) {
            if (s < 4) load_transposed(a[s], ptx::shared_address(stage.x), s);
            stage_state(state[s], place, s);
        });
        issue<Operand, ptx::Major::K, Rows>(o, state, Rows::k_major_low(ptx::shared_address(stage.q), 0, 0), false);
        factors(fade, stage.f.fade), factors(beta, stage.f.beta);
        ptx::wgmma_wait_group<1>();
        ptx::register_fence(e);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 f = fade[j];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 v = unpack(Operand{}, a[j / 2][j % 2 * 2 + half]);
                e[4 * j + 2 * half] = fmaf(f.x, e[4 * j + 2 * half], v.x);
                e[4 * j + 2 * half + 1] = fmaf(f.y, e[4 * j + 2 * half + 1], v.y);
            }
        }
        pack_scaled(a, e, beta);
        factors(fade, stage.f.query);
        register_fence(a), ptx::register_fence(e);
        issue<Operand, ptx::Major::K, Square>(e, a, Square::k_major_low(ptx::shared_address(stage.solve), 0, 0), true);
        const float decay = stage.f.decay, fall = stage.f.fall;
#pragma unroll
        for (int i = 0; i < D / 2; i++) S[i] *= decay;
        ptx::register_fence(S);
        ptx::wgmma_wait_group<1>();
        ptx::register_fence(o), register_fence(state);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 f = make_float2(fall * fade[j].x, fall * fade[j].y);
#pragma unroll
            for (int half = 0; half < 2; half++) o[4 * j + 2 * half] *= f.x, o[4 * j + 2 * half + 1] *= f.y;
        }
        factors(fade, stage.f.write);
        const float size = to_caller * stage.f.queries;
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(e), register_fence(a);
        pack_scaled(written, e, beta), pack_scaled(a, e, fade);
        register_fence(a), register_fence(written), ptx::register_fence(o), ptx::register_fence(S);
        issue<Operand, ptx::Major::K, Square>(o, written, Square::k_major_low(ptx::shared_address(stage.pairs), 0, 0), true);
        issue_with<ptx::Major::MN, Rows>(S, a, Rows::mn_major_low(ptx::shared_address(stage.k), 0, 0), true,
                                         [&](int s) { stage_rows(e, place, s); });
        ptx::wgmma_wait_group<1>();
        ptx::register_fence(o), register_fence(written);
        stage_outputs(o, size, ptx::shared_address(stage.x));
        staged(place);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(S), register_fence(a);
    }
    // The warp's columns of o, whose v it has read; tokens in rows.
    static __device__ __forceinline__ void stage_outputs(const float (&o)[32], float factor, uint32_t tile) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = ptx::cvt_rn_x2<T>(factor * o[8 * s + 2 * i], factor * o[8 * s + 2 * i + 1]);
            ptx::stmatrix_x4_trans(tile + Half::offset(16 * s + lane / 16 * 8 + lane % 8, 16 * warp + lane / 8 % 2 * 8), a);
        }
    }

    // D, after the chunk, becomes D before it, both still to be multiplied by `fall`. What does not depend on D is issued where the chain leaves the tensor cores idle.
    __device__ __forceinline__ void reverse(float (&grad)[D / 2], float &fall, const ScanStage<C> &stage, int place) const {
        float dr[32], y[32];
        uint32_t state[kSteps][4], a[4][4], b[4][4], d_o[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++) load_transposed(d_o[s], ptx::shared_address(stage.x), s);
        register_fence(d_o);
        issue<Operand, ptx::Major::MN, Square>(dr, d_o, Square::mn_major_low(ptx::shared_address(stage.pairs), 0, 0), false);
        pack<Operand>(state, grad);
        register_fence(state);
        when_free(place);
        issue_with<ptx::Major::K, Rows>(y, state, Rows::k_major_low(ptx::shared_address(stage.k), 0, 0), false,
                                        [&](int s) { stage_state(state[s], place, s); });
        const float decay = fall * stage.f.decay * stage.f.rise, next_fall = stage.f.fall;
#pragma unroll
        for (int i = 0; i < D / 2; i++) grad[i] *= decay;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 f = factor(stage.f.query, j);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 x = unpack(Operand{}, d_o[j / 2][j % 2 * 2 + half]);
                b[j / 2][j % 2 * 2 + half] = ptx::cvt_rn_x2<Operand>(f.x * x.x, f.y * x.y);
            }
        }
        float2 left[8], beta[8];
        factors(left, stage.f.left), factors(beta, stage.f.beta);
#pragma unroll
        for (int j = 0; j < 8; j++) left[j].x *= fall, left[j].y *= fall;
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(dr), ptx::register_fence(y), register_fence(d_o), register_fence(state);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 f = left[j];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                dr[4 * j + 2 * half] = fmaf(f.x, y[4 * j + 2 * half], dr[4 * j + 2 * half]);
                dr[4 * j + 2 * half + 1] = fmaf(f.y, y[4 * j + 2 * half + 1], dr[4 * j + 2 * half + 1]);
            }
        }
        pack_scaled(a, dr, beta);
        factors(beta, stage.f.erase);
        register_fence(a), ptx::register_fence(dr), register_fence(b), ptx::register_fence(grad);
        issue<Operand, ptx::Major::MN, Square>(dr, a, Square::mn_major_low(ptx::shared_address(stage.solve), 0, 0), true);
        issue<Operand, ptx::Major::MN, Rows>(grad, b, Rows::mn_major_low(ptx::shared_address(stage.q), 0, 0), true);
        ptx::wgmma_wait_group<1>();
        ptx::register_fence(dr), register_fence(a);
        pack_scaled(a, dr, beta);
        register_fence(a);
        issue_with<ptx::Major::MN, Rows>(grad, a, Rows::mn_major_low(ptx::shared_address(stage.k), 0, 0), true,
                                         [&](int s) { stage_rows(dr, place, s); });
        staged(place);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(grad), register_fence(a), register_fence(b);
        fall = next_fall;
    }

    template <bool kReverse>
    __device__ __forceinline__ void compute() const {
        const BwdParams &p = call.p();
        const int lane = threadIdx.x % 32, row = job.item.v_cta + static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
        const Tensor start = place(job.from, kReverse ? p.d_final_state : p.state_in, false);
        float S[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; i++) S[i] = 0.0f;
        if (start) load_state(S, start, job.item.n, job.item.head, row, lane % 4 * 2);
        if (job.from == kGiven) multiply(S, unit().to);
        float fall =
            kReverse && job.chunks > 0 ? call.fall_behind(job.item.n, job.first_chunk + chunk_at(0), job.item.head) : 1.0f;
        if (kReverse) multiply(S, inverse_power(fall));
        const float to_caller = kOutputs && !job.no_v ? unit().from : 0.0f;
        RingState<kStages> at;
#pragma unroll 1
        for (int step = 0; step < job.chunks; step++, at.advance()) {
            ring.wait_full(at);
            const ScanStage<C> &stage = smem.stage[at.stage];
            if constexpr (kOutputs)
                forward_with_outputs(S, to_caller, stage, step % 2);
            else
                kReverse ? reverse(S, fall, stage, step % 2) : forward(S, stage, step % 2);
            if (step + kStages < job.chunks) give_back(at.stage);
        }
        // An operand that overflowed made its column of the state infinite or NaN from there on.
        const Unit own = unit();
        bool bad = own.apart;
#pragma unroll
        for (int i = 0; i < D / 2; i++) bad = bad || !(fabsf(S[i]) < __uint_as_float(0x7f800000u));
        if (bad && job.chunks > 0) call.flag(job.item.n, job.item.head);
        multiply(S, job.to == kGiven ? fall * own.from : fall);
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            const Tensor end = place(i == 0 ? job.to : job.to_transposed, kReverse ? p.d_initial_state : p.state_out, i == 1);
            if (end) store_state(S, end, job.item.n, job.item.head, row, lane % 4 * 2);
        }
    }

    static __device__ __forceinline__ void multiply(float (&S)[D / 2], float factor) {
#pragma unroll
        for (int i = 0; i < D / 2; i++) S[i] *= factor;
    }
    // Of a state: a slot, or the caller's array, or none.
    __device__ __forceinline__ Tensor place(int number, const Tensor &given, bool transposed) const {
        if (number == kGiven) return given;
        Tensor t;
        if (number == kNothing) return t;
        t.data = reinterpret_cast<char *>(call.state_at(number));
        t.dtype = DType::F32;
        t.stride[0] = 0, t.stride[1] = 0, t.stride[2] = transposed ? D : 1, t.stride[3] = transposed ? 1 : D;
        return t;
    }
};

// A CTA's work.
template <class C, bool kOutputs>
__device__ __forceinline__ void scan_cta(const Call &call, const ScanItem *items) {
    extern __shared__ __align__(1024) char smem_bytes[];
    using Scan = Scan<C, kOutputs>;
    ScanSmem<C> &smem = *reinterpret_cast<ScanSmem<C> *>(smem_bytes);
    const BwdParams &p = call.p();
    delta_bwd::after_those_before();
    const int half = blockIdx.x % C::kHalves;
    const unsigned index = blockIdx.x / C::kHalves;
    Job job;
    if (items) {
        static_cast<ScanItem &>(job) = items[index];
        if (job.n < 0) return;                           // all of the cluster
        job.reverse = __shfl_sync(~0u, job.reverse, 0);  // or ptxas takes the warps for divergent and serialises the products
        job.item = make_item(p, job.n, job.head, 64 * half);
    } else {
        // Reverse scans, which take longer, come first.
        const unsigned states = static_cast<unsigned>(p.N * p.HV), HV = static_cast<unsigned>(p.HV);
        job.item = make_item(p, index % states / HV, static_cast<int>(index % states % HV), 64 * half);
        if (job.item.length <= kFewTokens && job.item.length > 0) return;  // all of the cluster; the kernels in float do it
        job.no_v = false;
        job.begin = 0, job.chunks = (job.item.length + kC - 1) / kC, job.silent = 0;
        job.reverse = call.part == Part::Whole ? index < states : call.part == Part::Reverse;
        job.from = kGiven, job.to = kGiven, job.to_transposed = kNothing;
    }
    job.first_chunk = call.exact.w.chunk_start[job.item.n];
    const Scan scan{{call, smem, job}};
    const bool alone = ptx::cluster_nctarank() == 1;
    if (threadIdx.x == 0) {
        scan.ring.init(1 + kConverters / 32 * kWarpArrivals, ptx::cluster_nctarank() * (Scan::kEachTells ? Scan::kReaders : 1));
        scan.given.init(1 + 32, 1);
    }
    if (job.no_v) {
        for (int i = threadIdx.x; i < kStages * Scan::Half::kBytes / 16; i += kScanThreads) {
            constexpr int kUnits = Scan::Half::kBytes / 16;
            reinterpret_cast<uint4 *>(smem.stage[i / kUnits].x)[i % kUnits] = make_uint4(0, 0, 0, 0);
        }
    }
    __syncthreads();
    if (!alone) ptx::barrier_cluster_arrive(), ptx::barrier_cluster_wait();
    if (threadIdx.x >= 192)
        scan.convert();
    else if (threadIdx.x >= 160)
        scan.store();
    else if (threadIdx.x >= 128)
        scan.load();
    else if (!kOutputs && job.reverse)
        scan.template compute<!kOutputs>();
    else
        scan.template compute<false>();
    if (!alone) ptx::barrier_cluster_arrive(), ptx::barrier_cluster_wait();  // until nobody writes here any more
}

template <class C>
LaunchConfig scan_config(const Call &call, bool cut) {
    LaunchConfig config;
    const BwdParams &p = call.exact.p;
    config.grid.x = (cut ? call.cut.room : (call.part == Part::Whole ? 2 : 1) * p.N) * p.HV * C::kHalves;
    config.block.x = kScanThreads;
    config.cluster.x = C::kHalves;
    config.smem_bytes = sizeof(ScanSmem<C>);
    config.stream = static_cast<cudaStream_t>(p.stream);
    config.programmatic = true;
    return config;
}

}  // namespace linattn::cuda::gdn_bwd
