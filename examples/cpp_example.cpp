// Decoding from C++17: four requests share a pool of states, one slot of the batch is padding.
// examples/CMakeLists.txt builds it with find_package(pylinattn).
#include <linattn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <stdexcept>
#include <vector>

namespace {

constexpr int N = 4, HV = 2, K = 16, V = 8, P = 6;  // sequences, heads, head sizes, rows of the pool

linattn_dtype dtype_of(const float *) { return LINATTN_F32; }
linattn_dtype dtype_of(const int32_t *) { return LINATTN_I32; }

// A row-major array, described where it lies. linattn_tensor borrows: the vector has to outlive the call.
template <class T>
linattn_tensor view(std::vector<T> &values, std::initializer_list<int64_t> shape) {
    linattn_tensor tensor{};
    tensor.data = values.data();
    tensor.dtype = dtype_of(values.data());
    tensor.device_type = LINATTN_CPU;
    tensor.ndim = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), tensor.shape);
    int64_t stride = 1;
    for (int axis = tensor.ndim - 1; axis >= 0; stride *= tensor.shape[axis--]) tensor.strides[axis] = stride;
    return tensor;
}

void require(linattn_status status) {
    if (status != LINATTN_OK) throw std::runtime_error(linattn_last_error());
}

std::vector<float> waves(int count, float step) {
    std::vector<float> x(count);
    for (int i = 0; i < count; ++i) x[i] = 0.3f * std::sin(step * static_cast<float>(i + 1));
    return x;
}

// S = exp(g) S;  u = beta (v - S'k);  S = S + k u';  o = scale S'q, for one head
void plain(float *S, const float *q, const float *k, const float *v, float g, float beta, double scale, double *o) {
    for (int i = 0; i < K * V; ++i) S[i] *= std::exp(g);
    for (int j = 0; j < V; ++j) {
        float u = v[j];
        for (int i = 0; i < K; ++i) u -= S[i * V + j] * k[i];
        o[j] = 0;
        for (int i = 0; i < K; ++i) o[j] += scale * (S[i * V + j] += k[i] * beta * u) * q[i];
    }
}

}  // namespace

int main() try {
    auto q = waves(N * HV * K, 1.1f), k = waves(N * HV * K, 1.7f), v = waves(N * HV * V, 2.3f);
    auto pool = waves(P * HV * K * V, 0.7f), expected_pool = pool;
    std::vector<float> g(N * HV, -0.2f), beta(N * HV, 0.5f), o(N * HV * V, NAN);
    std::vector<int32_t> rows = {5, 0, -1, 3};

    linattn_gdn_decode_args args{};  // what stays zero is not given
    args.size = sizeof args;
    args.q = view(q, {N, 1, HV, K}), args.k = view(k, {N, 1, HV, K}), args.v = view(v, {N, 1, HV, V});
    args.g = view(g, {N, 1, HV}), args.beta = view(beta, {N, 1, HV});
    args.state = view(pool, {P, HV, K, V}), args.read_indices = view(rows, {N});
    args.o = view(o, {N, 1, HV, V});
    args.scale = 1 / std::sqrt(static_cast<double>(K));
    uint64_t bytes = 0;
    require(linattn_gdn_decode_workspace(&args, &bytes));  // makes every check but those of values
    std::printf("%llu bytes of workspace\n", static_cast<unsigned long long>(bytes));
    require(linattn_gdn_decode(&args));

    double worst = 0;
    for (int n = 0; n < N; ++n)
        for (int h = 0; h < HV; ++h) {
            int at = n * HV + h;
            double want[V] = {};  // of padding
            float *S = expected_pool.data() + (rows[n] * HV + h) * K * V;
            if (rows[n] >= 0) plain(S, &q[at * K], &k[at * K], &v[at * V], g[at], beta[at], args.scale, want);
            for (int j = 0; j < V; ++j) worst = std::max(worst, std::abs(o[at * V + j] - want[j]));
        }
    for (int i = 0; i < P * HV * K * V; ++i) worst = std::max(worst, std::abs(static_cast<double>(pool[i]) - expected_pool[i]));
    std::printf("%s, largest error %.1e\n", linattn_last_path(), worst);

    args.k.shape[3] = K - 1;  // a mistake is a sentence, and nothing is written
    if (linattn_gdn_decode(&args) != LINATTN_ERR_VALUE) return 1;
    std::printf("%s\n", linattn_last_error());
    return worst < 1e-5 ? 0 : 1;
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
