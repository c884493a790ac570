#include "pool.h"

#include <chrono>

namespace orchard {
namespace {

// Between two steps Python picks a token, so helpers spin a little longer before work than at a barrier inside it.
// After somebody has slept, the others spin longer for the rest of the run: waking takes a while, and one late thread must not
// send all of them to sleep in turns.
constexpr long SPIN_FOR_WORK = 150'000, SPIN_AT_BARRIER = 60'000, SPIN_AFTER_SLEEP = 300'000;  // nanoseconds

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline long now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void Gate::open() {
    // Sequentially consistent, here and in `wait`: either we see the sleeper or it sees the new value.
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> hold(mutex_);
        condition_.notify_all();
    }
}

bool Gate::wait(unsigned seen, long spin_nanoseconds) {
    long end = 0;
    for (int turn = 0;; turn++) {
        if (value() != seen) return false;
        pause();
        if (turn % 32 == 31) {  // the clock costs more than a look
            long time = now();
            if (end == 0)
                end = time + spin_nanoseconds;
            else if (time > end)
                break;
        }
    }
    std::unique_lock<std::mutex> hold(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    condition_.wait(hold, [&] { return value_.load(std::memory_order_seq_cst) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return true;
}

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
    for (int thread = 1; thread < threads_; thread++) helpers_.emplace_back([this, thread] { serve(thread); });
}

Pool::~Pool() {
    stop_ = true;
    start_.open();
    for (std::thread& helper : helpers_) helper.join();
}

void Pool::serve(int thread) {
    unsigned seen = 0;
    for (;;) {
        start_.wait(seen, SPIN_FOR_WORK);
        seen++;
        if (stop_) return;
        if (thread < active_) work_(argument_, thread, active_);
        if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) finish_.open();
    }
}

void Pool::run(Work work, void* argument, int threads) {
    work_ = work;
    argument_ = argument;
    active_ = threads > threads_ ? threads_ : threads;
    sleeps_.store(0, std::memory_order_relaxed);
    if (active_ <= 1) {
        active_ = 1;
        work(argument, 0, 1);
        return;
    }
    unsigned seen = finish_.value();
    running_.store(threads_ - 1, std::memory_order_release);
    start_.open();
    work(argument, 0, active_);
    finish_.wait(seen, SPIN_AT_BARRIER);
}

void Pool::barrier() {
    if (active_ <= 1) return;
    unsigned seen = meeting_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == active_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        meeting_.open();
    } else {
        if (meeting_.wait(seen, sleeps() ? SPIN_AFTER_SLEEP : SPIN_AT_BARRIER)) sleeps_.fetch_add(1, std::memory_order_relaxed);
    }
}

}  // namespace orchard
