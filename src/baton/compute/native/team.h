// A few threads that compute one step together. Work is claimed item by item; a phase ends when its items are done, not
// when every thread has come: a thread that the system has put aside between items holds nobody up.
//
// Guests are helpers on cores that belong to somebody else. They run there with Linux's idle policy, that is, only
// while the owner sleeps; when it wakes, the kernel puts them aside at once, perhaps with an item in hand. Then they are
// called home: onto the core of the caller, which waits for that item anyway. After a rest they are sent out again, into
// the middle of a step too: whoever comes late finds the phases before done.
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

// A number that threads wait for: spinning for some microseconds, then asleep.
class Waitable {
public:
    uint32_t load() const { return value_.load(std::memory_order_seq_cst); }
    uint32_t add(uint32_t amount);  // returns the number before; wakes sleepers
    uint32_t add_quietly(uint32_t amount) { return value_.fetch_add(amount, std::memory_order_seq_cst); }
    void reset() { value_.store(0, std::memory_order_relaxed); }
    void wait_while(uint32_t seen) const;  // until the number is another than `seen`, or sooner
    bool spin_while(uint32_t seen) const;  // for some microseconds; returns whether it is still the same
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

// Where a team's threads run.
struct Places {
    int threads;              // of its own, the caller of run() included
    std::vector<int> cores;   // one for each of these; empty: where the system puts them
};

class Team {
public:
    // The caller keeps to the first core while it is in run(), and only then: threads that Python starts later would
    // inherit it.
    explicit Team(const Places& places);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // Take a guest to a core of somebody else's; not while run() is. Returns whether the system allows it: one of
    // ordinary rank would take the core from its owner. Needs `cores`, to know where home is.
    bool invite(int core);

    int threads() const { return places_.threads + int(guests_.size()); }
    int64_t recalls() const { return recalls_; }  // how often guests were called home

    // Run body(thread) on the calling thread (0) and on those helpers that come in time. `phases`: most that it has.
    void run(int phases, const std::function<void(int)>& body);

    // Called by body, with the same index and count by all: compute items [0, items), each once, all before it returns.
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
    // Of a guest that has passed by a phase that was not done: it takes no more of this step, wherever others are.
    bool leaves() const { return is_leaving = is_leaving || is_home(); }

    enum class Who { caller, helper, guest };
    static thread_local Who here;         // what the current thread is
    static thread_local bool is_leaving;  // of a guest: has been called home in this step

    const Places places_;
    std::vector<int> guests_;  // the core of each; their threads are the last of the helpers
    std::vector<Phase> phases_;
    const std::function<void(int)>* body_ = nullptr;
    Waitable started_;  // counts steps
    Waitable invited_;  // counts how often guests were asked in
    Waitable inside_;   // helpers that may be in a step's body
    std::atomic<bool> open_{false}, ended_{false};
    std::atomic<int> guests_at_work_{0};   // that hold an item
    std::atomic<bool> home_{false};       // guests are called home, and take no items
    std::atomic<int64_t> recalls_{0};
    std::mutex moving_;                    // of whoever calls them home or sends them out
    int64_t out_since_ns_ = 0;             // of guests
    int64_t rest_until_ns_ = 0, rest_ns_;  // until when they rest (0: they are out, or just called), and for how long
    std::vector<std::thread> helpers_;
};

}  // namespace baton
