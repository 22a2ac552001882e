// A few threads that compute one step together. Threads claim work item by item. A phase ends when its items are done,
// not when every thread has arrived, so a thread that the system preempts between items delays no other thread.
//
// Guests are threads on cores of other workers. They run with Linux's policy SCHED_IDLE, while the owner sleeps. When
// the owner wakes, the kernel preempts a guest at once, perhaps in the middle of an item. Guests are then recalled: moved
// to the core of the caller, which waits for that item. After a rest they return to their cores, possibly during a step:
// a late thread skips the phases that are done.
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

// A number that threads wait for: they spin for some microseconds, then sleep.
class Waitable {
public:
    uint32_t load() const { return value_.load(std::memory_order_seq_cst); }
    uint32_t add(uint32_t amount);  // return the number before; wake sleepers
    uint32_t add_quietly(uint32_t amount) { return value_.fetch_add(amount, std::memory_order_seq_cst); }
    void reset() { value_.store(0, std::memory_order_relaxed); }
    void wait_while(uint32_t seen) const;  // until the number differs from `seen`, or earlier
    bool spin_while(uint32_t seen) const;  // for some microseconds; return whether it still equals `seen`
    void sleep_while(uint32_t seen, const timespec* limit = nullptr) const;
    void wake();

private:
    std::atomic<uint32_t> value_{0};
    mutable std::atomic<uint32_t> sleepers_{0};
};

struct alignas(64) Phase {
    std::atomic<uint32_t> claimed{0};
    alignas(64) Waitable done;
};

// The threads of a team, and their cores.
struct Places {
    int threads;              // without guests, including the caller of run()
    std::vector<int> cores;   // one per thread; empty: chosen by the system
};

class Team {
public:
    // The caller is pinned to the first core only during run(), because threads that Python starts later would inherit
    // the pinning.
    explicit Team(const Places& places);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // Start a guest on a core of another worker. Not during run(). Return whether the system allows SCHED_IDLE: with
    // ordinary priority it would take the core from its owner. Needs `cores`, to know the caller's core.
    bool invite(int core);

    int threads() const { return places_.threads + int(guests_.size()); }
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
        const uint32_t all = uint32_t(items);
        const bool guest = here == Who::guest;
        if (here == Who::caller && is_home()) send_out();
        while (phase.claimed.load(std::memory_order_relaxed) < all && !(guest && leaves())) {
            if (guest) guests_at_work_.fetch_add(1);
            const uint32_t item = phase.claimed.fetch_add(1, std::memory_order_relaxed);
            if (item < all) {
                compute(int(item));
                if (phase.done.add_quietly(1) + 1 == all) phase.done.wake();
            }
            if (guest) guests_at_work_.fetch_sub(1);
        }
        for (uint32_t seen = phase.done.load(); seen < all && !(guest && leaves()); seen = phase.done.load())
            wait_for_items(phase.done, seen);
    }

private:
    void end();
    void help(int thread);
    bool wait_while(const Waitable& number, uint32_t seen);
    void wait_for_items(const Waitable& done, uint32_t seen);
    void call_home();
    void send_out();
    pthread_t thread_of(size_t guest) const;
    int64_t guests_ran_ns() const;
    bool is_home() const { return home_.load(std::memory_order_relaxed); }
    // For a guest that left a phase before it was done: it takes no more items of this step.
    bool leaves() const { return is_leaving = is_leaving || is_home(); }

    enum class Who { caller, helper, guest };
    static thread_local Who here;         // the role of the current thread
    static thread_local bool is_leaving;  // of a guest: it was recalled in this step

    const Places places_;
    std::vector<int> guests_;  // the core of each guest; their threads are the last helpers
    std::vector<Phase> phases_;
    const std::function<void(int)>* body_ = nullptr;
    Waitable started_;  // counts steps
    Waitable invited_;  // counts invitations of guests
    Waitable inside_;   // helpers that may be in a step's body
    std::atomic<bool> open_{false}, ended_{false};
    std::atomic<int> guests_at_work_{0};   // guests that hold an item
    std::atomic<bool> home_{false};       // guests are recalled, and take no items
    std::atomic<int64_t> recalls_{0};
    std::mutex moving_;                    // held while guests are recalled or sent out
    int64_t out_since_ns_ = 0;             // since guests are out
    int64_t rest_until_ns_ = 0, rest_ns_;  // end of their rest (0: they are out, or just recalled), and its length
    std::vector<std::thread> helpers_;
};

}  // namespace baton
