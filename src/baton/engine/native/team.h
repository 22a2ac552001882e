// A few threads that compute one step together. Work is claimed item by item; a phase ends when its items are done, not
// when every thread has come: a thread that the system has put aside between items holds nobody up.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace baton {

// Spins for some microseconds, then sleeps until the number is another than it was.
class Waitable {
public:
    uint32_t load() const { return value_.load(std::memory_order_seq_cst); }
    uint32_t add(uint32_t amount);  // returns the number before; wakes sleepers
    uint32_t add_quietly(uint32_t amount) { return value_.fetch_add(amount, std::memory_order_seq_cst); }
    void reset() { value_.store(0, std::memory_order_relaxed); }
    void wait_while(uint32_t seen) const;
    void wake();

private:
    std::atomic<uint32_t> value_{0};
    mutable std::atomic<uint32_t> sleepers_{0};
};

struct alignas(64) Phase {
    std::atomic<uint32_t> claimed{0};
    alignas(64) Waitable done;
};

class Team {
public:
    // cores: one per thread; helpers are pinned to theirs, which leaves the first to the calling thread. That one is not
    // pinned: threads that Python starts later would inherit it. Empty: threads are where the system puts them.
    Team(int threads, const std::vector<int>& cores);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int threads() const { return threads_; }

    // Run body(thread) on the calling thread (0) and on those helpers that come in time. `phases`: most that it has.
    void run(int phases, const std::function<void(int)>& body);

    // Called by body, with the same index and count by all: compute items [0, items), each once, all before it returns.
    template <class F>
    void phase(int index, int items, F compute) {
        if (threads_ == 1) {
            for (int item = 0; item < items; item++) compute(item);
            return;
        }
        Phase& phase = phases_[size_t(index)];
        const uint32_t all = uint32_t(items);
        while (phase.claimed.load(std::memory_order_relaxed) < all) {
            const uint32_t item = phase.claimed.fetch_add(1, std::memory_order_relaxed);
            if (item >= all) break;
            compute(int(item));
            if (phase.done.add_quietly(1) + 1 == all) phase.done.wake();
        }
        for (uint32_t seen = phase.done.load(); seen < all; seen = phase.done.load()) phase.done.wait_while(seen);
    }

private:
    void help(int thread, int core);

    const int threads_;
    std::vector<Phase> phases_;
    const std::function<void(int)>* body_ = nullptr;
    Waitable started_;  // counts steps
    Waitable inside_;   // helpers that may be in a step's body
    std::atomic<bool> open_{false}, ended_{false};
    std::vector<std::thread> helpers_;
};

}  // namespace baton
