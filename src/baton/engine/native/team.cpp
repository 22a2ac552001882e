#include "team.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace baton {
namespace {

// About 10 microseconds: more than a phase's threads usually differ by, less than a slice of anybody else's time.
constexpr int SPINS = 400;

void futex(const std::atomic<uint32_t>* word, int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<const uint32_t*>(word), operation | FUTEX_PRIVATE_FLAG, value, nullptr);
}

void pin(pthread_t thread, int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(size_t(core), &set);
    pthread_setaffinity_np(thread, sizeof set, &set);
}

}  // namespace

uint32_t Waitable::add(uint32_t amount) {
    const uint32_t before = add_quietly(amount);
    wake();
    return before;
}

void Waitable::wake() {
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(&value_, FUTEX_WAKE, INT_MAX);
}

void Waitable::wait_while(uint32_t seen) const {
    for (int spin = 0; spin < SPINS; spin++) {
        if (load() != seen) return;
        _mm_pause();
    }
    // A waker that changes the number after our look at it either sees us here or makes the kernel refuse to sleep.
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (load() == seen) futex(&value_, FUTEX_WAIT, seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

Team::Team(int threads, const std::vector<int>& cores) : threads_(threads) {
    const bool pinned = cores.size() == size_t(threads);
    for (int thread = 1; thread < threads; thread++)
        helpers_.emplace_back([this, thread, core = pinned ? cores[size_t(thread)] : -1] { help(thread, core); });
}

Team::~Team() {
    ended_.store(true);
    started_.add(1);
    for (std::thread& helper : helpers_) helper.join();
}

void Team::run(int phases, const std::function<void(int)>& body) {
    if (threads_ == 1) return body(0);
    // Nobody is inside here, so everything may be set up for the next step.
    if (phases_.size() < size_t(phases)) phases_ = std::vector<Phase>(size_t(phases));
    for (Phase& phase : phases_) {
        phase.claimed.store(0, std::memory_order_relaxed);
        phase.done.reset();
    }
    body_ = &body;
    open_.store(true, std::memory_order_seq_cst);
    started_.add(1);
    body(0);
    // A helper announces itself before it looks whether it may come in: either it sees that it may not, or we see it.
    open_.store(false, std::memory_order_seq_cst);
    for (uint32_t inside = inside_.load(); inside != 0; inside = inside_.load()) inside_.wait_while(inside);
}

void Team::help(int thread, int core) {
    if (core >= 0) pin(pthread_self(), core);
    for (uint32_t seen = 0;;) {
        while (started_.load() == seen) started_.wait_while(seen);
        seen = started_.load();
        if (ended_.load()) return;
        inside_.add_quietly(1);
        if (open_.load(std::memory_order_seq_cst)) (*body_)(thread);
        inside_.add(uint32_t(-1));
    }
}

}  // namespace baton
