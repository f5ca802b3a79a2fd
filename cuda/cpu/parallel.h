// Threads for one call: started, used and joined inside it, so that nothing outlives the call and nothing is shared.
#pragma once
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

#include "../error.h"

namespace linattn::cpu {

// LINATTN_NUM_THREADS, else the processors this process may run on.
inline int thread_limit() {
    if (const char *text = std::getenv("LINATTN_NUM_THREADS"); text && *text) {
        char *end = nullptr;
        errno = 0;
        const long n = std::strtol(text, &end, 10);
        if (errno || *end || n < 1 || n > 4096)
            fail(Status::Value, "LINATTN_NUM_THREADS is \"%s\"; it must be a whole number from 1 to 4096", text);
        return static_cast<int>(n);
    }
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    const unsigned n = std::thread::hardware_concurrency();
    return n ? static_cast<int>(n) : 1;
}

// Denormals as zero while it lives: a state that fades away would otherwise make every product some hundred cycles slower on
// many processors. Numbers below 1.2e-38 (2.3e-308 in double) count as zero.
class FlushDenormals {
#if defined(__x86_64__)
  public:
    FlushDenormals() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(saved_ | 0x8040u); }
    ~FlushDenormals() { __builtin_ia32_ldmxcsr(saved_); }
    FlushDenormals(const FlushDenormals &) = delete;
    FlushDenormals &operator=(const FlushDenormals &) = delete;

  private:
    unsigned saved_;
#else
  public:
    FlushDenormals() {}  // not defaulted, so that an unused guard draws no warning
#endif
};

// Calls work(task, worker) once for every task in [0, tasks). The caller is worker 0; fewer threads than asked for may start.
// The first exception thrown by `work` is thrown again here, after all threads have ended.
template <class Work>
void parallel_for(int64_t tasks, int workers, const Work &work) {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;
    const auto loop = [&](int worker) {
        const FlushDenormals flush;
        try {
            for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) work(task, worker);
        } catch (...) {
            if (!failed.exchange(true)) error = std::current_exception();
            next.store(tasks, std::memory_order_relaxed);
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(workers - 1);
    try {
        for (int worker = 1; worker < workers; ++worker) threads.emplace_back(loop, worker);
    } catch (const std::system_error &) {
        // No more threads to be had: those that run, and this one, do all the work.
    }
    loop(0);
    for (std::thread &thread : threads) thread.join();
    if (error) std::rethrow_exception(error);
}

}  // namespace linattn::cpu
