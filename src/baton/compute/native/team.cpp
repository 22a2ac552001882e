#include "team.h"

#include <immintrin.h>
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

// About 10 microseconds: longer than the usual difference between threads of a phase, shorter than a scheduler slice.
constexpr int SPINS = 400;
// Sleep before the check whether guests still run: longer than short system tasks on a core.
constexpr timespec DOZE{0, 300'000};
// The minimum and maximum rest of guests after a recall. A time and not a number of steps, because a step of a long
// prompt takes as long as a hundred decode steps.
constexpr int64_t REST_NS = 4'000'000, REST_NS_MAX = 512'000'000;

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

bool rank(pthread_t thread, int policy) {
    const sched_param none{};
    return pthread_setschedparam(thread, policy, &none) == 0;
}

// Pins the calling thread to a core while this object exists. Otherwise the system may leave the caller on a helper's
// core, where the two take turns for milliseconds. A thread whose old cores are unknown is not pinned, because it could
// not return to them: for example on a machine with more cores than bits in a cpu_set_t.
class Pinned {
public:
    explicit Pinned(const std::vector<int>& cores)
        : pinned_(!cores.empty() && pthread_getaffinity_np(pthread_self(), sizeof before_, &before_) == 0 &&
                  pin(pthread_self(), cores[0])) {}
    ~Pinned() {
        if (pinned_) pthread_setaffinity_np(pthread_self(), sizeof before_, &before_);
    }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;

private:
    cpu_set_t before_;
    const bool pinned_;
};

}  // namespace

thread_local Team::Who Team::here = Team::Who::caller;
thread_local bool Team::is_leaving = false;

uint32_t Waitable::add(uint32_t amount) {
    const uint32_t before = add_quietly(amount);
    wake();
    return before;
}

void Waitable::wake() {
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(&value_, FUTEX_WAKE, INT_MAX, nullptr);
}

void Waitable::wait_while(uint32_t seen) const {
    if (spin_while(seen)) sleep_while(seen);
}

bool Waitable::spin_while(uint32_t seen) const {
    for (int spin = 0; spin < SPINS; spin++) {
        if (load() != seen) return false;
        _mm_pause();
    }
    return true;
}

void Waitable::sleep_while(uint32_t seen, const timespec* limit) const {
    // A waker that changes the number after it was read either sees this sleeper, or the kernel refuses to sleep.
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (load() == seen) futex(&value_, FUTEX_WAIT, seen, limit);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

Team::Team(const Places& places) : places_(places), rest_ns_(REST_NS) {
    try {
        for (int thread = 1; thread < places_.threads; thread++)
            helpers_.emplace_back([this, thread] {
                here = Who::helper;
                if (!places_.cores.empty()) pin(pthread_self(), places_.cores[size_t(thread)]);
                help(thread);
            });
    } catch (...) {  // no more threads: those that run must end before this object
        end();
        throw;
    }
}

bool Team::invite(int core) {
    if (places_.cores.empty()) return false;
    std::promise<bool> ready;
    const int number = threads();
    guests_.reserve(guests_.size() + 1);  // before the thread starts, so that no thread is lost if memory runs out
    helpers_.reserve(helpers_.size() + 1);
    std::thread guest([this, core, number, &ready] {
        here = Who::guest;
        const bool allowed = pin(pthread_self(), core) && rank(pthread_self(), SCHED_IDLE);
        ready.set_value(allowed);
        if (allowed) help(number);
    });
    if (!ready.get_future().get()) {
        guest.join();
        return false;
    }
    guests_.push_back(core);
    helpers_.push_back(std::move(guest));
    return true;
}

Team::~Team() { end(); }

void Team::end() {
    ended_.store(true);
    started_.add(1);
    invited_.add(1);
    for (std::thread& helper : helpers_) helper.join();
}

void Team::run(int phases, const std::function<void(int)>& body) {
    if (threads() == 1) return body(0);
    // No thread is inside a step here, so the next step may be set up.
    if (phases_.size() < size_t(phases)) phases_ = std::vector<Phase>(size_t(phases));
    for (Phase& phase : phases_) {
        phase.claimed.store(0, std::memory_order_relaxed);
        phase.done.reset();
    }
    body_ = &body;
    const Pinned pinned(places_.cores);
    open_.store(true, std::memory_order_seq_cst);
    started_.add(1);
    if (is_home()) send_out();
    else invited_.add(1);
    body(0);
    // A helper announces itself before it checks whether it may enter: so it sees that it may not, or the caller sees it.
    open_.store(false, std::memory_order_seq_cst);
    for (uint32_t inside = inside_.load(); inside != 0; inside = inside_.load())
        if (!wait_while(inside_, inside)) call_home();
}

void Team::help(int thread) {
    const Waitable& begun = here == Who::guest ? invited_ : started_;
    for (uint32_t seen = 0;;) {
        while (begun.load() == seen) begun.wait_while(seen);
        seen = begun.load();
        if (ended_.load()) return;
        inside_.add_quietly(1);
        is_leaving = false;
        if (open_.load(std::memory_order_seq_cst)) (*body_)(thread);
        inside_.add(uint32_t(-1));
    }
}

// ---- guests ------------------------------------------------------------------------------------------------------

// Return whether waiting makes sense: false if the number is unchanged, and no guest ran during the wait.
bool Team::wait_while(const Waitable& number, uint32_t seen) {
    if (!number.spin_while(seen)) return true;
    if (guests_.empty()) {
        number.sleep_while(seen);
        return true;
    }
    const int64_t ran_ns = guests_ran_ns();
    number.sleep_while(seen, &DOZE);
    return number.load() != seen || guests_ran_ns() != ran_ns;
}

// Wait for a phase's last items. Recall guests if a preempted guest holds one.
void Team::wait_for_items(const Waitable& done, uint32_t seen) {
    if (here == Who::guest) done.wait_while(seen);
    else if (!wait_while(done, seen) && guests_at_work_.load() > 0) call_home();
}

// Guests continue on the core of the caller, which sleeps until they finish their items. They get ordinary priority if
// the system allows it, because other processes may compete for this core.
void Team::call_home() {
    const std::lock_guard<std::mutex> lock(moving_);
    if (home_.exchange(true)) return;
    recalls_.fetch_add(1, std::memory_order_relaxed);
    for (size_t guest = 0; guest < guests_.size(); guest++) {
        pin(thread_of(guest), places_.cores[0]);
        rank(thread_of(guest), SCHED_OTHER);
    }
}

// A recall costs about ten microseconds, or the wait for a core. If guests were out for less time than their last rest,
// they rest longer. Only the caller of run() calls this.
void Team::send_out() {
    const int64_t now = now_ns();
    if (rest_until_ns_ == 0) {  // they were recalled since the last check
        const bool was_worth_it = now - out_since_ns_ > rest_ns_;
        rest_ns_ = was_worth_it ? std::max(rest_ns_ / 2, REST_NS) : std::min(2 * rest_ns_, REST_NS_MAX);
        rest_until_ns_ = now + rest_ns_;
    }
    if (now < rest_until_ns_) return;
    rest_until_ns_ = 0;
    out_since_ns_ = now;
    const std::lock_guard<std::mutex> lock(moving_);  // the recalling thread may not have reached all guests yet
    for (size_t guest = 0; guest < guests_.size(); guest++) {
        rank(thread_of(guest), SCHED_IDLE);
        pin(thread_of(guest), guests_[guest]);
    }
    home_.store(false);
    invited_.add(1);
}

pthread_t Team::thread_of(size_t guest) const {
    return const_cast<std::thread&>(helpers_[size_t(places_.threads) - 1 + guest]).native_handle();
}

int64_t Team::guests_ran_ns() const {
    int64_t total = 0;
    for (size_t guest = 0; guest < guests_.size(); guest++) {
        clockid_t clock;
        timespec ran{};
        if (pthread_getcpuclockid(thread_of(guest), &clock) == 0 && clock_gettime(clock, &ran) == 0) total += ns(ran);
    }
    return total;
}

}  // namespace baton
