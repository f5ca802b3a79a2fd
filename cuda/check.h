// Checks of what crosses the C boundary: one line per tensor in api.cpp, in the words of linattn.h.
#pragma once
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "error.h"
#include "include/linattn.h"
#include "ops.h"

namespace linattn {

inline bool given(const linattn_tensor &t) { return t.ndim != 0; }

inline const char *dtype_name(int32_t dtype) {
    static const char *const names[] = {"none", "f32", "f64", "bf16", "f16", "i32", "i64", "u8"};
    return dtype >= 0 && dtype <= 7 ? names[dtype] : "an unknown dtype";
}

inline std::string shape_text(const int64_t *sizes, int ndim) {
    std::string text = "[";
    for (int i = 0; i < ndim; ++i) text += (i ? "," : "") + std::to_string(sizes[i]);
    return text + "]";
}

// Bytes that a tensor touches: [lo, hi).
struct Span {
    int64_t lo = 0, hi = 0;
    bool empty() const { return lo >= hi; }
};

// Extent in bytes of the axes for which `keep` holds, relative to the first element.
template <class Keep>
Span span_of(const linattn_tensor &t, Keep keep) {
    int64_t bytes = dtype_bytes(static_cast<DType>(t.dtype));
    Span s{0, bytes};
    for (int i = 0; i < t.ndim; ++i) {
        if (t.shape[i] == 0) return {};
        if (t.shape[i] == 1 || !keep(t.strides[i] * bytes)) continue;
        int64_t reach = (t.shape[i] - 1) * t.strides[i] * bytes;
        (reach < 0 ? s.lo : s.hi) += reach;
    }
    return s;
}

// May two tensors share a byte? Exact for ranges apart and for slices of one fused buffer, where every address modulo the
// common stride stays inside an interval; otherwise says yes.
inline bool may_overlap(const linattn_tensor &a, const linattn_tensor &b) {
    auto all = [](int64_t) { return true; };
    Span sa = span_of(a, all), sb = span_of(b, all);
    if (sa.empty() || sb.empty()) return false;
    int64_t gap = static_cast<char *>(b.data) - static_cast<char *>(a.data);
    if (sa.hi <= gap + sb.lo || gap + sb.hi <= sa.lo) return false;
    for (int i = 0; i < a.ndim; ++i) {
        if (a.strides[i] == 0 || a.shape[i] == 1) continue;
        int64_t period = std::llabs(a.strides[i]) * dtype_bytes(static_cast<DType>(a.dtype));
        auto inner = [period](int64_t stride) { return stride % period != 0; };
        Span ia = span_of(a, inner), ib = span_of(b, inner);
        int64_t start = ((gap + ib.lo - ia.lo) % period + period) % period;
        if (start >= ia.hi - ia.lo && start + (ib.hi - ib.lo) <= period) return false;
    }
    return true;
}

// Do two elements of one tensor share an address? Exact for axes that nest, which is all that an output may be.
inline bool overlaps_itself(const linattn_tensor &t) {
    bool used[5] = {};
    int64_t reach = 0;  // largest offset of the axes taken so far
    for (int round = 0; round < t.ndim; ++round) {
        int next = -1;
        for (int i = 0; i < t.ndim; ++i) {
            if (t.shape[i] == 0) return false;
            if (!used[i] && (next < 0 || std::llabs(t.strides[i]) < std::llabs(t.strides[next]))) next = i;
        }
        used[next] = true;
        if (t.shape[next] == 1) continue;
        if (std::llabs(t.strides[next]) <= reach) return true;
        reach += (t.shape[next] - 1) * std::llabs(t.strides[next]);
    }
    return false;
}

inline bool same_array(const linattn_tensor &a, const linattn_tensor &b) {
    return given(a) && given(b) && a.data == b.data && a.ndim == b.ndim && a.dtype == b.dtype &&
           std::memcmp(a.strides, b.strides, sizeof(int64_t) * a.ndim) == 0 &&
           std::memcmp(a.shape, b.shape, sizeof(int64_t) * a.ndim) == 0;
}

// Checks the tensors of one call. A dimension letter is bound where it first appears and must be equal ever after.
class Checker {
  public:
    explicit Checker(const char *op) : op_(op) {}

    const char *op() const { return op_; }
    int32_t device_type() const { return device_type_; }
    int32_t device_id() const { return device_id_; }
    bool on_gpu() const { return device_type_ == LINATTN_CUDA; }

    enum Kind { In, MaybeIn, Out, MaybeOut, InOut };

    // One tensor, in the words of its line in linattn.h: kind, shape, dtypes ("bf16|f16", or "=q" for the dtype of q).
    Tensor operator()(const char *name, const linattn_tensor &t, Kind kind, const char *shape, const char *dtypes) {
        if (!given(t)) {
            if (kind == MaybeIn || kind == MaybeOut) return {};
            fail(Status::Value, "%s: %s is required, shape %s", op_, name, shape);
        }
        if (t.reserved) fail(Status::Value, "%s: %s has reserved = %u; it must be 0", op_, name, t.reserved);
        if (t.ndim < 0 || t.ndim > 5) fail(Status::Value, "%s: %s has ndim %d; 1 to 5 are possible", op_, name, t.ndim);
        check_dtype(name, t, dtypes);
        check_device(name, t);
        check_shape(name, t, shape);
        check_memory(name, t, kind == Out || kind == MaybeOut || kind == InOut);
        if (count_ == kMax) fail(Status::Runtime, "%s: more tensors than the checker holds", op_);
        seen_[count_++] = {name, &t, kind == Out || kind == MaybeOut || kind == InOut};
        Tensor r;
        r.data = static_cast<char *>(t.data);
        for (int i = 0; i < t.ndim; ++i) r.stride[i] = t.strides[i];
        r.dtype = static_cast<DType>(t.dtype);
        return r;
    }

    // Size of a dimension letter, or `otherwise` where no tensor given had it.
    int64_t size(const char *symbol, int64_t otherwise = 0) const {
        for (int i = 0; i < bound_; ++i)
            if (dims_[i].symbol == symbol) return dims_[i].size;
        return otherwise;
    }
    void bind(std::string_view symbol, int64_t size, const char *because) { dims_[bound_++] = {symbol, size, because}; }

    // Outputs must not touch anything else, except for pairs named by allow_same (the very same array).
    void allow_same(const linattn_tensor &a, const linattn_tensor &b) { allowed_[allowed_count_++] = {&a, &b}; }
    void overlaps() const {
        for (int i = 0; i < count_; ++i) {
            if (!seen_[i].written) continue;
            if (overlaps_itself(*seen_[i].t))
                fail(Status::Value, "%s: elements of %s share memory (strides %s); give an array whose elements do not", op_,
                     seen_[i].name, shape_text(seen_[i].t->strides, seen_[i].t->ndim).c_str());
            for (int j = 0; j < count_; ++j)
                if (i != j && !(seen_[j].written && j < i) && !is_allowed(seen_[i].t, seen_[j].t) &&
                    may_overlap(*seen_[i].t, *seen_[j].t))
                    fail(Status::Value, "%s: %s overlaps %s; give it memory of its own", op_, seen_[i].name, seen_[j].name);
        }
    }

    // Rows that a GPU kernel reads with 16-byte accesses: last axis contiguous, all else in multiples of 16 bytes.
    void rows_of_16_bytes(const char *name, const linattn_tensor &t, int contiguous_axis) const {
        if (!on_gpu() || !given(t)) return;
        int64_t bytes = dtype_bytes(static_cast<DType>(t.dtype));
        bool good = t.shape[contiguous_axis] == 1 || t.strides[contiguous_axis] == 1;
        bool empty = false;
        for (int i = 0; i < t.ndim; ++i) {
            empty |= t.shape[i] == 0;
            if (i != contiguous_axis && t.shape[i] != 1) good &= t.strides[i] * bytes % 16 == 0;
        }
        good &= reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
        if (!good && !empty)
            fail(Status::Value,
                 "%s: %s on a GPU needs axis %d contiguous, the other strides in multiples of 16 bytes and an address that is "
                 "one "
                 "too; got strides %s of %d bytes at %p; copy it first",
                 op_, name, contiguous_axis, shape_text(t.strides, t.ndim).c_str(), static_cast<int>(bytes), t.data);
    }
    void state_layout(const char *name, const linattn_tensor &t) const {
        if (on_gpu() && given(t)) rows_of_16_bytes(name, t, t.strides[3] == 1 ? 3 : 2);
    }

  private:
    struct Dim {
        std::string_view symbol;  // of a literal
        int64_t size;
        const char *because;
    };
    struct Seen {
        const char *name;
        const linattn_tensor *t;
        bool written;
    };
    static constexpr int kMax = 32;

    void check_dtype(const char *name, const linattn_tensor &t, const char *dtypes) const {
        if (dtypes[0] == '=') {
            for (int i = 0; i < count_; ++i)
                if (std::strcmp(seen_[i].name, dtypes + 1) == 0 && seen_[i].t->dtype != t.dtype)
                    fail(Status::Type, "%s: %s must have the dtype of %s, %s, got %s", op_, name, dtypes + 1,
                         dtype_name(seen_[i].t->dtype), dtype_name(t.dtype));
            return;
        }
        const char *mine = dtype_name(t.dtype);
        size_t length = std::strlen(mine);
        for (const char *p = dtypes; *p;) {
            const char *end = std::strchr(p, '|');
            size_t n = end ? static_cast<size_t>(end - p) : std::strlen(p);
            if (n == length && std::strncmp(p, mine, n) == 0) return;
            p += n + (end ? 1 : 0);
        }
        fail(Status::Type, "%s: %s must be %s, got %s", op_, name, dtypes, mine);
    }

    void check_device(const char *name, const linattn_tensor &t) {
        if (t.device_type != LINATTN_CPU && t.device_type != LINATTN_CUDA)
            fail(Status::Type, "%s: %s is on a device of DLPack type %d; the CPU (1) and CUDA (2) are known", op_, name,
                 t.device_type);
        if (count_ == 0) {
            device_type_ = t.device_type;
            device_id_ = t.device_type == LINATTN_CUDA ? t.device_id : 0;
        } else if (t.device_type != device_type_ || (t.device_type == LINATTN_CUDA && t.device_id != device_id_)) {
            fail(Status::Type, "%s: %s is on %s %d, but %s is on %s %d; all arrays of a call must be on one device", op_, name,
                 t.device_type == LINATTN_CUDA ? "CUDA device" : "CPU", t.device_id, seen_[0].name,
                 on_gpu() ? "CUDA device" : "CPU", device_id_);
        }
    }

    void check_shape(const char *name, const linattn_tensor &t, const char *shape) {
        int axis = 0;
        for (const char *p = shape + 1; *p && *p != '|'; ++axis) {
            const char *end = p + std::strcspn(p, ",]");
            std::string_view symbol(p, static_cast<size_t>(end - p));
            int64_t plus = 0;
            if (size_t at = symbol.find('+'); at != symbol.npos) {
                plus = std::atoi(symbol.data() + at + 1);
                symbol = symbol.substr(0, at);
            }
            p = end + 1;
            if (axis >= t.ndim) continue;
            int64_t size = t.shape[axis] - plus;
            if (t.shape[axis] < 0) fail(Status::Value, "%s: %s has a negative size", op_, name);
            if (size < 0) fail(Status::Value, "%s: %s must have at least %d elements", op_, name, static_cast<int>(plus));
            bool known = false;
            for (int i = 0; i < bound_; ++i) {
                if (dims_[i].symbol != symbol) continue;
                known = true;
                if (dims_[i].size != size)
                    fail(Status::Value, "%s: %s must have shape %s where %.*s is %lld (from %s), got %s", op_, name, shape,
                         static_cast<int>(symbol.size()), symbol.data(), static_cast<long long>(dims_[i].size),
                         dims_[i].because, shape_text(t.shape, t.ndim).c_str());
            }
            if (!known) bind(symbol, size, name);
        }
        if (axis != t.ndim)
            fail(Status::Value, "%s: %s must have shape %s, got %s", op_, name, shape, shape_text(t.shape, t.ndim).c_str());
    }

    void check_memory(const char *name, const linattn_tensor &t, bool written) const {
        for (int i = 0; i < t.ndim; ++i)
            if (t.shape[i] == 0) return;
        constexpr int64_t kFar = int64_t{1} << 56;  // bytes, beyond any address; sums of five of them are still numbers
        for (int i = 0; i < t.ndim; ++i) {
            int64_t reach = 0;
            if (__builtin_mul_overflow(t.shape[i] - 1, t.strides[i], &reach) ||
                __builtin_mul_overflow(reach, dtype_bytes(static_cast<DType>(t.dtype)), &reach) || reach < -kFar ||
                reach > kFar)
                fail(Status::Value, "%s: %s reaches beyond all memory: shape %s, strides %s", op_, name,
                     shape_text(t.shape, t.ndim).c_str(), shape_text(t.strides, t.ndim).c_str());
        }
        if (!t.data) fail(Status::Value, "%s: %s has no data (NULL)", op_, name);
        if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(dtype_bytes(static_cast<DType>(t.dtype))))
            fail(Status::Value, "%s: %s at %p is not aligned to its elements", op_, name, t.data);
        if (written && (t.flags & LINATTN_READ_ONLY))
            fail(Status::Value, "%s: %s is written, but the array given is read-only", op_, name);
    }

    bool is_allowed(const linattn_tensor *a, const linattn_tensor *b) const {
        for (int i = 0; i < allowed_count_; ++i)
            if (((allowed_[i].a == a && allowed_[i].b == b) || (allowed_[i].a == b && allowed_[i].b == a)) &&
                same_array(*a, *b))
                return true;
        return false;
    }

    struct Pair {
        const linattn_tensor *a, *b;
    };
    const char *op_;
    int32_t device_type_ = LINATTN_CPU, device_id_ = 0;
    Dim dims_[kMax] = {};
    int bound_ = 0;
    Seen seen_[kMax] = {};
    int count_ = 0;
    Pair allowed_[8] = {};
    int allowed_count_ = 0;
};

}  // namespace linattn
