#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace baton {
namespace {

constexpr size_t LARGE_PAGE = size_t{2} << 20;

void* map(size_t bytes) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    if (bytes >= LARGE_PAGE) madvise(data, bytes, MADV_HUGEPAGE);  // refused where the system has none: only slower
    return data;
}

}  // namespace

Memory::~Memory() {
    if (data_ != nullptr) munmap(data_, bytes_);
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

void* Memory::reserve(size_t bytes) {
    if (bytes <= bytes_) return data_;
    const size_t wanted = (bytes + 4095) / 4096 * 4096;
    if (data_ != nullptr) munmap(std::exchange(data_, nullptr), std::exchange(bytes_, 0));
    data_ = map(wanted);
    bytes_ = wanted;
    return data_;
}

}  // namespace baton
