// What a call of decode of one token hands to its kernel: views of tensors, options in one word, parameters. Verify for its outputs
// alone uses them too.
#pragma once
#include <cstddef>

#include "tokens.cuh"

namespace linattn::cuda::delta_decode_one {

// Of a tensor [B,T,HV,..] or [HV,..]; strides in bytes, 32 bits without a sign: an address is then a multiplication.
struct View {
    char *data;
    uint32_t batch, head;
    __device__ __forceinline__ char *at(uint32_t n, uint32_t h) const {
        return data + uint64_t{n} * batch + uint64_t{h} * head;
    }
};
struct HeadView {
    const char *data;
    uint32_t head;
    __device__ __forceinline__ const char *at(uint32_t h) const { return data + uint64_t{h} * head; }
};

// What helpers of tokens.cuh ask of a tensor.
struct Known {
    DType dtype;
    __device__ __forceinline__ explicit operator bool() const { return dtype != DType::None; }
    __device__ __forceinline__ uint32_t load(const char *at, uint32_t element = 0) const {
        return dtype == DType::F32 ? reinterpret_cast<const uint32_t *>(at)[element]
                                   : reinterpret_cast<const uint16_t *>(at)[element];
    }
};
// As float_of of any tensor: selected, not branched to, for what follows waits for it and a branch is 20 cycles.
__device__ __forceinline__ float float_of(const Known &t, uint32_t bits) {
    float half = __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
    float other = __uint_as_float(t.dtype == DType::BF16 ? bits << 16 : bits);
    return t.dtype == DType::F16 ? half : other;
}

// The options of a call, in one word.
struct Options {
    uint32_t bits;
    enum Field {
        kQ = 0,
        kG = 3,
        kBeta = 6,
        kALog = 9,
        kBias = 12,
        kBetaForm = 15,
        kNorm = 17,
        kReadWide,
        kWriteWide,
        kStateLast,  // verify of bf16 states: they are asked for when the tokens are there
        kGate = 30
    };
};
// In the two highest bits of a word. Comparisons of one number with three would become a table of jumps, and that is one more line
// of constants to wait for from cold memory.
struct GateChoice {
    uint32_t bits;
    __device__ __forceinline__ bool operator==(Gate gate) const {
        return gate == Gate::None      ? bits < 1u << 30
               : gate == Gate::Bounded ? static_cast<int32_t>(bits) < 0
                                       : (bits >> 30 & 1) != 0;
    }
};
static_assert(static_cast<int>(Gate::Softplus) == 1 && static_cast<int>(Gate::Bounded) == 2, "as GateChoice tests them");
struct Choices {
    Known q, g, beta, A_log, dt_bias;
    GateChoice gate;
    BetaForm beta_form;
    bool qk_l2norm;
    float lower_bound;
    __device__ __forceinline__ Choices(const Options &o, float bound)
        : q(dtype(o, Options::kQ)),
          g(dtype(o, Options::kG)),
          beta(dtype(o, Options::kBeta)),
          A_log(dtype(o, Options::kALog)),
          dt_bias(dtype(o, Options::kBias)),
          gate{o.bits},
          beta_form(static_cast<BetaForm>(o.bits >> Options::kBetaForm & 3)),
          qk_l2norm(o.bits >> Options::kNorm & 1),
          lower_bound(bound) {}
    static __device__ __forceinline__ Known dtype(const Options &o, int field) {
        return {static_cast<DType>(o.bits >> field & 7)};
    }
};

// What of DeltaParams the call needs. With the 16 bytes before it, this fits one line of 256 bytes of the constant cache behind the
// SM's, whose own lines are of 64: the first has all that a state's address needs, the next one v, q and k, the third the gates.
struct Params {
    Options options;
    uint32_t rows;  // of the pool
    char *state;
    const char *read, *write;        // null: row n; the same rows as read
    uint32_t state_row, state_head;  // strides in bytes
    uint32_t read_stride, write_stride;
    View v, q, k;
    uint32_t key_of;  // key head = head key_of >> 16
    uint32_t ahead;   // sequences between a state and the one that is brought to L2 when it is loaded; 0: none is
    float scale, lower_bound;
    View g, beta;
    HeadView A_log, dt_bias;
    View o;
};
static_assert(sizeof(Params) <= 256 - 16 && offsetof(Params, v) == 64 - 16 && offsetof(Params, g) == 128 - 16,
              "lines of constants");

// Row of the pool, as it lies in a table of i32 or i64.
struct Row {
    uint32_t low, high = 0;
    __device__ __forceinline__ explicit Row(uint32_t n) : low(n) {}
    __device__ __forceinline__ Row(const char *table, uint32_t stride, bool wide, uint32_t n) {
        auto *at = reinterpret_cast<const uint32_t *>(table + uint64_t{n} * stride);
        low = at[0];
        if (wide) high = at[1];
    }
    __device__ __forceinline__ bool within(uint32_t rows) const { return high == 0 && low < rows; }
};

}  // namespace linattn::cuda::delta_decode_one
