// A team of threads that runs one function at a time, together with the caller.
//
// Waiting threads spin for some microseconds, because the next piece of work usually comes at once, and then sleep, because
// spinning for ever takes the core from whoever else wants it: another program, or a late thread of our own.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace orchard {

// Waits for a counter to leave a value: spins first, then sleeps.
class Gate {
  public:
    unsigned value() const { return value_.load(std::memory_order_acquire); }
    void open();                                      // moves the counter on and wakes the sleepers
    bool wait(unsigned seen, long spin_nanoseconds);  // returns when the counter is no longer `seen`: whether it slept

  private:
    alignas(64) std::atomic<unsigned> value_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable condition_;
};

class Pool {
  public:
    using Work = void (*)(void* argument, int thread, int threads);

    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return threads_; }
    // Runs work on `threads` threads (at most size()), the caller being thread 0; returns when all are done. One run at a time.
    void run(Work work, void* argument, int threads);
    // Inside a run: nobody goes on before everybody of the run is here.
    void barrier();
    // How often a thread of the last run fell asleep at a barrier. Steps are cut evenly and take microseconds: whoever waits so
    // long waits for a thread that has lost its core to another program.
    int sleeps() const { return sleeps_.load(std::memory_order_relaxed); }

  private:
    void serve(int thread);

    const int threads_;
    std::vector<std::thread> helpers_;
    Gate start_, finish_, meeting_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> running_{0};
    Work work_ = nullptr;
    void* argument_ = nullptr;
    int active_ = 1;
    bool stop_ = false;
    std::atomic<int> sleeps_{0};
};

}  // namespace orchard
