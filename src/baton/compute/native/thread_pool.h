// A thread pool that computes one step. Threads claim work items with an atomic counter. A phase ends when its items
// are done, not when every thread has arrived (no barrier), so a thread that is preempted between items delays no
// other.
//
// Guests are threads of the pool that use the idle cores of other workers. They run under Linux's policy SCHED_IDLE, so
// the kernel preempts a guest as soon as the core's owner wakes, perhaps in the middle of an item. The pool then
// recalls its guests: it moves them to the caller's core, where they finish their items. After an exponential back-off
// it sends them to their cores again, possibly during a step: a late thread skips the phases that are done.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace baton {

// An atomic counter that threads wait on: they spin for some microseconds, then sleep on a futex.
class WaitableCounter {
public:
    uint32_t load() const { return value_.load(std::memory_order_seq_cst); }
    uint32_t add(uint32_t amount);  // return the value before; wake sleepers
    uint32_t add_without_wake(uint32_t amount) { return value_.fetch_add(amount, std::memory_order_seq_cst); }
    void reset() { value_.store(0, std::memory_order_relaxed); }
    void wait_while(uint32_t seen) const;  // until the value differs from `seen`; may return early
    bool spin_while(uint32_t seen) const;  // return whether the value still equals `seen`
    void sleep_while(uint32_t seen, const timespec* limit = nullptr) const;
    void wake();

private:
    std::atomic<uint32_t> value_{0};
    mutable std::atomic<uint32_t> sleepers_{0};
};

struct alignas(64) Phase {
    std::atomic<uint32_t> claimed{0};
    alignas(64) WaitableCounter done;
};

// The number of threads of a pool, and their cores.
struct ThreadPlacement {
    int threads;             // without guests, including the caller of run()
    std::vector<int> cores;  // one per thread; empty: chosen by the system
};

class ThreadPool {
public:
    // The caller is pinned to the first core only during run(), because threads that Python starts later would inherit
    // the pinning.
    explicit ThreadPool(const ThreadPlacement& placement);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // Start a guest on a core of another worker. Not during run(). Return whether the system allows SCHED_IDLE: with
    // ordinary priority it would take the core from its owner. Needs `cores`, to know the caller's core.
    bool add_guest(int core);

    int threads() const { return placement_.threads + int(guests_.size()); }
    int64_t recalls() const { return recalls_; }  // how often guests were recalled

    // Run body(thread) on the calling thread (0) and on the helpers that arrive in time. `phases`: its maximum number.
    void run(int phases, const std::function<void(int)>& body);

    // Called by body with the same index and count in all threads. Compute items [0, items), each once; return when all
    // are done.
    template <class F>
    void phase(int index, int items, F compute) {
        if (threads() == 1) {
            for (int item = 0; item < items; item++) compute(item);
            return;
        }
        Phase& phase = phases_[size_t(index)];
        const uint32_t item_count = uint32_t(items);
        const bool is_guest = role == Role::guest;
        if (role == Role::caller && guests_are_recalled()) redeploy_guests();
        while (phase.claimed.load(std::memory_order_relaxed) < item_count && !(is_guest && leaves_step())) {
            if (is_guest) guest_items_.fetch_add(1);
            const uint32_t item = phase.claimed.fetch_add(1, std::memory_order_relaxed);
            if (item < item_count) {
                compute(int(item));
                if (phase.done.add_without_wake(1) + 1 == item_count) phase.done.wake();
            }
            if (is_guest) guest_items_.fetch_sub(1);
        }
        for (uint32_t seen = phase.done.load(); seen < item_count && !(is_guest && leaves_step());
             seen = phase.done.load())
            wait_for_items(phase.done, seen);
    }

private:
    void stop();
    void run_helper(int thread);
    bool wait_while(const WaitableCounter& counter, uint32_t seen);
    void wait_for_items(const WaitableCounter& done, uint32_t seen);
    void recall_guests();
    void redeploy_guests();
    pthread_t thread_of(size_t guest) const;
    int64_t guests_ran_ns() const;
    bool guests_are_recalled() const { return are_recalled_.load(std::memory_order_relaxed); }
    // Return whether the calling guest has left this step. It stays out of the step after its recall.
    bool leaves_step() const { return has_left_step = has_left_step || guests_are_recalled(); }

    enum class Role { caller, helper, guest };
    static thread_local Role role;           // of the current thread
    static thread_local bool has_left_step;  // of a guest: recalled during this step

    const ThreadPlacement placement_;
    std::vector<int> guests_;  // the core of each guest; their threads are the last helpers
    std::vector<Phase> phases_;
    const std::function<void(int)>* body_ = nullptr;
    WaitableCounter step_starts_;     // steps so far
    WaitableCounter guest_starts_;    // steps that guests were asked to join
    WaitableCounter helpers_inside_;  // helpers that may be in a step's body
    std::atomic<bool> accepts_helpers_{false}, ended_{false};
    std::atomic<int> guest_items_{0};        // items that guests hold
    std::atomic<bool> are_recalled_{false};  // guests are recalled and take no items
    std::atomic<int64_t> recalls_{0};
    std::mutex guests_mutex_;        // held while guests are moved between cores
    int64_t deployed_since_ns_ = 0;  // when guests were last sent to their cores
    int64_t backoff_until_ns_ = 0;   // 0: guests are on their cores, or were just recalled
    int64_t backoff_ns_;
    std::vector<std::thread> helpers_;
};

}  // namespace baton
