// Reading the caller's arrays: element addresses, index tables, blocks of a state, and scratch of our own.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "kernels.h"

namespace linattn::cpu {

inline char *element(const Tensor &x, int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) {
    const int64_t offset = i0 * x.stride[0] + i1 * x.stride[1] + i2 * x.stride[2] + i3 * x.stride[3];
    return x.data + offset * dtype_bytes(x.dtype);
}

inline int64_t index_at(const Tensor &table, int64_t i, int64_t j = 0) {
    const char *at = element(table, i, j);
    return table.dtype == DType::I32 ? *reinterpret_cast<const int32_t *>(at) : *reinterpret_cast<const int64_t *>(at);
}

// Row of a pool for sequence n: from the table, or n itself; -1 where there is none.
inline int64_t pool_row(const Tensor &indices, int64_t n, int64_t rows) {
    return clamp_row(indices ? index_at(indices, n) : n, rows);
}

// Columns [col, col + cols) of one head's [K,V] in one row of a pool.
template <class Real>
struct StateView {
    char *data = nullptr;
    DType dtype = DType::None;
    int64_t stride_k = 0, stride_v = 0, K = 0, cols = 0;

    StateView() = default;
    StateView(const Tensor &pool, int64_t row, int64_t head, int64_t col, int64_t K_, int64_t cols_)
        : data(element(pool, row, head, 0, col)),
          dtype(pool.dtype),
          stride_k(pool.stride[2]),
          stride_v(pool.stride[3]),
          K(K_),
          cols(cols_) {}

    explicit operator bool() const { return data != nullptr; }

    // Can the kernels work on it where it lies?
    bool direct() const {
        return dtype == (sizeof(Real) == 8 ? DType::F64 : DType::F32) && stride_v == 1 && cols == kCols<Real>;
    }
    Real *at() const { return reinterpret_cast<Real *>(data); }

    void load(const Kernels<Real> &kernel, Real *block) const {
        if (cols < kCols<Real>) std::memset(block, 0, K * kCols<Real> * sizeof(Real));
        kernel.load(block, kCols<Real>, data, dtype, stride_k, stride_v, K, cols);
    }
    void store(const Kernels<Real> &kernel, const Real *block, int64_t ld) const {
        kernel.store(data, dtype, stride_k, stride_v, block, ld, K, cols);
    }
};

// Copies one head's state to another row, pool or dtype as it is; from a row below 0, zeros. In double, which holds every dtype
// exactly (numbers below 1.2e-38 may become 0, see FlushDenormals). `block` takes K * 128 bytes.
inline void copy_state(const Kernels<double> &kernel, const Tensor &from, int64_t from_row, const Tensor &to, int64_t to_row,
                       int64_t head, int64_t col, int64_t end, int64_t K, double *block) {
    for (; col < end; col += kCols<double>) {
        const int64_t cols = end - col < kCols<double> ? end - col : kCols<double>;
        if (from)
            StateView<double>(from, from_row, head, col, K, cols).load(kernel, block);
        else
            std::memset(block, 0, K * kCols<double> * sizeof(double));
        StateView<double>(to, to_row, head, col, K, cols).store(kernel, block, kCols<double>);
    }
}

// Scratch of a call: `count` equal, aligned parts, one per worker. Throws std::bad_alloc.
class Scratch {
  public:
    Scratch(int64_t part_bytes, int64_t count)
        : part_bytes_((part_bytes + 2 * kAlign - 1) / kAlign * kAlign),  // a line apart, too
          memory_(std::malloc(part_bytes_ * count + kAlign), &std::free) {
        if (!memory_) throw std::bad_alloc();
    }
    char *part(int64_t worker) const {
        const uintptr_t base = (reinterpret_cast<uintptr_t>(memory_.get()) + kAlign - 1) / kAlign * kAlign;
        return reinterpret_cast<char *>(base) + part_bytes_ * worker;
    }

  private:
    static constexpr int64_t kAlign = 64;
    int64_t part_bytes_;
    std::unique_ptr<void, void (*)(void *)> memory_;
};

// Hands out aligned pieces of one part; with no part to cut from it only counts the bytes.
class Cutter {
  public:
    explicit Cutter(char *from) : from_(from) {}
    template <class Real>
    Real *take(int64_t n) {
        char *piece = from_ ? from_ + bytes_ : nullptr;
        bytes_ += (n * static_cast<int64_t>(sizeof(Real)) + 63) / 64 * 64;
        return reinterpret_cast<Real *>(piece);
    }
    int64_t bytes() const { return bytes_; }

  private:
    char *from_;
    int64_t bytes_ = 0;
};

}  // namespace linattn::cpu
