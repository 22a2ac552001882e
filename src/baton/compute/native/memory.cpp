#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace baton {
namespace {

constexpr size_t LARGE_PAGE = size_t{2} << 20;

constexpr size_t SLAB_BYTES = size_t{64} << 20;  // untouched pages of it take no memory
constexpr size_t LINE_BYTES = 64;

constexpr size_t rounded_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

uint8_t* map_private(size_t bytes, int protection) {
    // Large mappings are aligned to a huge page, because small pages would fill the space before it.
    const size_t align = bytes >= LARGE_PAGE ? LARGE_PAGE : 0;
    void* data = mmap(nullptr, bytes + align, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    uint8_t* first = static_cast<uint8_t*>(data);
    if (align == 0) return first;
    uint8_t *end = first + bytes + align, *aligned = first + (align - reinterpret_cast<uintptr_t>(first) % align) % align;
    if (aligned != first) munmap(first, size_t(aligned - first));
    if (aligned + bytes != end) munmap(aligned + bytes, size_t(end - aligned - bytes));
    return aligned;
}

// Put the file's pages into huge pages, whatever the system's default for shared memory is. Where the kernel cannot
// (before Linux 6.1, or with too little contiguous memory), small pages stay, and steps are slower.
void collapse(uint8_t* data, size_t bytes) {
    constexpr int COLLAPSE = 25;  // MADV_COLLAPSE; older headers lack it
    for (size_t at = 0; at + LARGE_PAGE <= bytes; at += LARGE_PAGE) madvise(data + at, LARGE_PAGE, COLLAPSE);
}

}  // namespace

Mapping::~Mapping() {
    if (data_ != nullptr) munmap(data_, bytes_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

Mapping Mapping::zeroed(size_t bytes) {
    Mapping made(map_private(bytes, PROT_READ | PROT_WRITE), bytes);
    if (bytes >= LARGE_PAGE) madvise(made.data_, bytes, MADV_HUGEPAGE);  // without huge pages it fails, and is only slower
    return made;
}

Mapping Mapping::of_file(int file, size_t offset, size_t bytes, bool writable) {
    Mapping made(map_private(bytes, PROT_NONE), bytes);  // an aligned place, which the file replaces
    const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    if (mmap(made.data_, bytes, protection, MAP_SHARED | MAP_FIXED, file, off_t(offset)) == MAP_FAILED)
        fail("cannot map the file of the weights");
    if (!writable) collapse(made.data_, bytes);
    return made;
}

void* GrowingBuffer::reserve(size_t bytes) {
    if (bytes <= memory_.bytes()) return memory_.data();
    memory_ = Mapping();  // free the old memory first
    memory_ = Mapping::zeroed(rounded_up(bytes, 4096));
    return memory_.data();
}

void* SlabAllocator::allocate_bytes(size_t bytes) {
    const size_t wanted = rounded_up(bytes, LINE_BYTES);
    if (wanted > left_) {
        const size_t slab_bytes = rounded_up(std::max(SLAB_BYTES, wanted), LARGE_PAGE);
        slabs_.push_back({new_slab(slab_bytes), file_bytes_});
        if (has_file()) file_bytes_ += slab_bytes;
        next_ = slabs_.back().memory.data();
        left_ = slab_bytes;
    }
    void* piece = next_;
    next_ += wanted, left_ -= wanted;
    return piece;
}

Mapping SlabAllocator::new_slab(size_t bytes) {
    if (!has_file()) return Mapping::zeroed(bytes);
    if (ftruncate(file_, off_t(file_bytes_ + bytes)) != 0) fail("cannot enlarge the file of the weights");
    return Mapping::of_file(file_, file_bytes_, bytes, true);
}

int64_t SlabAllocator::offset_of(const void* allocated) const {
    const uint8_t* address = static_cast<const uint8_t*>(allocated);
    for (const Slab& slab : slabs_)
        if (address >= slab.memory.data() && address < slab.memory.data() + slab.memory.bytes())
            return int64_t(slab.offset) + (address - slab.memory.data());
    throw std::logic_error("weights outside of their slabs");
}

int SlabAllocator::seal_file() {
    const size_t used = rounded_up(file_bytes_ - left_, LARGE_PAGE);
    slabs_.clear();  // the seal does not stop writes through mappings that exist
    next_ = nullptr, left_ = 0;
    if (ftruncate(file_, off_t(used)) != 0) fail("cannot cut the file of the weights");
    // Not F_SEAL_WRITE: CRIU adds the seals of a restored file while the file is mapped.
    if (fcntl(file_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE) != 0)
        fail("cannot seal the file of the weights");
    return std::exchange(file_, NO_FILE);
}

const Mapping& SlabAllocator::keep(Mapping mapping) {
    left_ = 0;
    return slabs_.emplace_back(Slab{std::move(mapping), 0}).memory;
}

}  // namespace baton
