#include "thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <future>
#include <utility>

namespace baton {
namespace {

// About 10 microseconds: longer than the usual skew between threads of a phase, shorter than a scheduler slice.
constexpr int SPINS = 400;
// The sleep before the caller checks whether guests still run: longer than short system tasks on a core.
constexpr timespec GUEST_CHECK_PERIOD{0, 300'000};
// The back-off of guests after a recall. A time and not a number of steps, because a step of a long prompt takes as
// long as a hundred decode steps.
constexpr int64_t BACKOFF_NS_MIN = 4'000'000, BACKOFF_NS_MAX = 512'000'000;

void pause_core() {
#if defined(__x86_64__)
    _mm_pause();
#else
    __asm__ volatile("isb");  // `yield` does nothing on most ARM processors
#endif
}

void futex(const std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
    syscall(SYS_futex, reinterpret_cast<const uint32_t*>(word), operation | FUTEX_PRIVATE_FLAG, value, limit);
}

bool pin(pthread_t thread, int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(size_t(core), &set);
    return pthread_setaffinity_np(thread, sizeof set, &set) == 0;
}

int64_t ns(const timespec& time) { return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; }

int64_t now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return ns(now);
}

bool set_scheduling_policy(pthread_t thread, int policy) {
    const sched_param none{};
    return pthread_setschedparam(thread, policy, &none) == 0;
}

// Pins the calling thread to the first core while this object exists. Otherwise the system may leave the caller on a
// helper's core, where the two take turns for milliseconds. A thread whose old cores are unknown is not pinned, because
// it could not return to them: for example on a machine with more cores than bits in a cpu_set_t.
class ScopedPin {
public:
    explicit ScopedPin(const std::vector<int>& cores)
        : pinned_(!cores.empty() && pthread_getaffinity_np(pthread_self(), sizeof before_, &before_) == 0 &&
                  pin(pthread_self(), cores[0])) {}
    ~ScopedPin() {
        if (pinned_) pthread_setaffinity_np(pthread_self(), sizeof before_, &before_);
    }
    ScopedPin(const ScopedPin&) = delete;
    ScopedPin& operator=(const ScopedPin&) = delete;

private:
    cpu_set_t before_;
    const bool pinned_;
};

}  // namespace

thread_local ThreadPool::Role ThreadPool::role = ThreadPool::Role::caller;
thread_local bool ThreadPool::has_left_step = false;

uint32_t WaitableCounter::add(uint32_t amount) {
    const uint32_t before = add_without_wake(amount);
    wake();
    return before;
}

void WaitableCounter::wake() {
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(&value_, FUTEX_WAKE, INT_MAX, nullptr);
}

void WaitableCounter::wait_while(uint32_t seen) const {
    if (spin_while(seen)) sleep_while(seen);
}

bool WaitableCounter::spin_while(uint32_t seen) const {
    for (int spin = 0; spin < SPINS; spin++) {
        if (load() != seen) return false;
        pause_core();
    }
    return true;
}

void WaitableCounter::sleep_while(uint32_t seen, const timespec* limit) const {
    // A thread that changes the value after it was read either sees this sleeper, or the futex call returns at once.
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (load() == seen) futex(&value_, FUTEX_WAIT, seen, limit);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

ThreadPool::ThreadPool(const ThreadPlacement& placement) : placement_(placement), backoff_ns_(BACKOFF_NS_MIN) {
    try {
        for (int thread = 1; thread < placement_.threads; thread++)
            helpers_.emplace_back([this, thread] {
                role = Role::helper;
                if (!placement_.cores.empty()) pin(pthread_self(), placement_.cores[size_t(thread)]);
                run_helper(thread);
            });
    } catch (...) {  // no more threads: those that run must be joined before the pool is freed
        stop();
        throw;
    }
}

bool ThreadPool::add_guest(int core) {
    if (placement_.cores.empty()) return false;
    std::promise<bool> ready;
    const int thread = threads();
    guests_.reserve(guests_.size() + 1);  // before the thread starts, so that no thread is lost if memory runs out
    helpers_.reserve(helpers_.size() + 1);
    std::thread guest([this, core, thread, &ready] {
        role = Role::guest;
        const bool allowed = pin(pthread_self(), core) && set_scheduling_policy(pthread_self(), SCHED_IDLE);
        ready.set_value(allowed);
        if (allowed) run_helper(thread);
    });
    if (!ready.get_future().get()) {
        guest.join();
        return false;
    }
    guests_.push_back(core);
    helpers_.push_back(std::move(guest));
    return true;
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    ended_.store(true);
    step_starts_.add(1);
    guest_starts_.add(1);
    for (std::thread& helper : helpers_) helper.join();
}

void ThreadPool::run(int phases, const std::function<void(int)>& body) {
    if (threads() == 1) return body(0);
    // No thread is inside a step here, so the next step may be set up.
    if (phases_.size() < size_t(phases)) phases_ = std::vector<Phase>(size_t(phases));
    for (Phase& phase : phases_) {
        phase.claimed.store(0, std::memory_order_relaxed);
        phase.done.reset();
    }
    body_ = &body;
    const ScopedPin pinned(placement_.cores);
    accepts_helpers_.store(true, std::memory_order_seq_cst);
    step_starts_.add(1);
    if (guests_are_recalled()) redeploy_guests();
    else guest_starts_.add(1);
    body(0);
    // A helper announces itself before it checks whether it may enter: so it sees that it may not, or the caller sees
    // it.
    accepts_helpers_.store(false, std::memory_order_seq_cst);
    for (uint32_t inside = helpers_inside_.load(); inside != 0; inside = helpers_inside_.load())
        if (!wait_while(helpers_inside_, inside)) recall_guests();
}

void ThreadPool::run_helper(int thread) {
    const WaitableCounter& begun = role == Role::guest ? guest_starts_ : step_starts_;
    for (uint32_t seen = 0;;) {
        while (begun.load() == seen) begun.wait_while(seen);
        seen = begun.load();
        if (ended_.load()) return;
        helpers_inside_.add_without_wake(1);
        has_left_step = false;
        if (accepts_helpers_.load(std::memory_order_seq_cst)) (*body_)(thread);
        helpers_inside_.add(uint32_t(-1));
    }
}

// ---- guests ------------------------------------------------------------------------------------------------------

// Return false if the value is unchanged and no guest ran during the wait: a preempted guest holds the last item.
bool ThreadPool::wait_while(const WaitableCounter& counter, uint32_t seen) {
    if (!counter.spin_while(seen)) return true;
    if (guests_.empty()) {
        counter.sleep_while(seen);
        return true;
    }
    const int64_t ran_ns = guests_ran_ns();
    counter.sleep_while(seen, &GUEST_CHECK_PERIOD);
    return counter.load() != seen || guests_ran_ns() != ran_ns;
}

// Wait for a phase's last items. Recall guests if a preempted guest holds one.
void ThreadPool::wait_for_items(const WaitableCounter& done, uint32_t seen) {
    if (role == Role::guest) done.wait_while(seen);
    else if (!wait_while(done, seen) && guest_items_.load() > 0) recall_guests();
}

// Move guests to the core of the caller, which sleeps until they finish their items. They get ordinary priority if the
// system allows it, because other processes may compete for this core.
void ThreadPool::recall_guests() {
    const std::lock_guard<std::mutex> lock(guests_mutex_);
    if (are_recalled_.exchange(true)) return;
    recalls_.fetch_add(1, std::memory_order_relaxed);
    for (size_t guest = 0; guest < guests_.size(); guest++) {
        pin(thread_of(guest), placement_.cores[0]);
        set_scheduling_policy(thread_of(guest), SCHED_OTHER);
    }
}

// Send guests to their cores when the back-off is over. A recall costs about ten microseconds, or the wait for a core.
// The back-off doubles if guests ran for less time than it, else it halves. Only the caller of run() calls this.
void ThreadPool::redeploy_guests() {
    const int64_t now = now_ns();
    if (backoff_until_ns_ == 0) {  // recalled since the last check
        const bool ran_long_enough = now - deployed_since_ns_ > backoff_ns_;
        backoff_ns_ =
            ran_long_enough ? std::max(backoff_ns_ / 2, BACKOFF_NS_MIN) : std::min(2 * backoff_ns_, BACKOFF_NS_MAX);
        backoff_until_ns_ = now + backoff_ns_;
    }
    if (now < backoff_until_ns_) return;
    backoff_until_ns_ = 0;
    deployed_since_ns_ = now;
    const std::lock_guard<std::mutex> lock(guests_mutex_);  // the recalling thread may not have reached all guests yet
    for (size_t guest = 0; guest < guests_.size(); guest++) {
        set_scheduling_policy(thread_of(guest), SCHED_IDLE);
        pin(thread_of(guest), guests_[guest]);
    }
    are_recalled_.store(false);
    guest_starts_.add(1);
}

pthread_t ThreadPool::thread_of(size_t guest) const {
    return const_cast<std::thread&>(helpers_[size_t(placement_.threads) - 1 + guest]).native_handle();
}

int64_t ThreadPool::guests_ran_ns() const {
    int64_t total = 0;
    for (size_t guest = 0; guest < guests_.size(); guest++) {
        clockid_t clock;
        timespec ran{};
        if (pthread_getcpuclockid(thread_of(guest), &clock) == 0 && clock_gettime(clock, &ran) == 0) total += ns(ran);
    }
    return total;
}

}  // namespace baton
