#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

namespace baton {
namespace {

constexpr size_t LARGE_PAGE = size_t{2} << 20;

constexpr size_t SLAB_BYTES = size_t{64} << 20;  // untouched pages of it take no memory
constexpr size_t LINE_BYTES = 64;

void* map(size_t bytes) {
    // Large mappings are aligned to a huge page, because small pages would fill the space before it.
    const size_t align = bytes >= LARGE_PAGE ? LARGE_PAGE : 0;
    void* data = mmap(nullptr, bytes + align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    if (align == 0) return data;
    uint8_t *first = static_cast<uint8_t*>(data), *end = first + bytes + align;
    uint8_t* aligned = first + (align - reinterpret_cast<uintptr_t>(first) % align) % align;
    if (aligned != first) munmap(first, size_t(aligned - first));
    if (aligned + bytes != end) munmap(aligned + bytes, size_t(end - aligned - bytes));
    madvise(aligned, bytes, MADV_HUGEPAGE);  // without huge pages it fails, and is only slower
    return aligned;
}

}  // namespace

GrowingBuffer::~GrowingBuffer() {
    if (data_ != nullptr) munmap(data_, bytes_);
}

GrowingBuffer::GrowingBuffer(GrowingBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

void* GrowingBuffer::reserve(size_t bytes) {
    if (bytes <= bytes_) return data_;
    const size_t wanted = (bytes + 4095) / 4096 * 4096;
    if (data_ != nullptr) munmap(std::exchange(data_, nullptr), std::exchange(bytes_, 0));
    data_ = map(wanted);
    bytes_ = wanted;
    return data_;
}

void* SlabAllocator::allocate_bytes(size_t bytes) {
    const size_t wanted = (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    if (wanted > left_) {
        const size_t slab_bytes = std::max(SLAB_BYTES, wanted);
        next_ = static_cast<uint8_t*>(slabs_.emplace_back().reserve(slab_bytes));
        left_ = slab_bytes;
    }
    void* piece = next_;
    next_ += wanted, left_ -= wanted;
    return piece;
}

}  // namespace baton
