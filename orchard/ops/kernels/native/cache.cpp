#include <cstdlib>
#include <new>

#if !defined(_WIN32)
#include <sys/mman.h>
#endif

#include "engine.h"

namespace orchard {

Block::Block(size_t bytes) : bytes_((bytes + 4095) / 4096 * 4096) {
    if (!bytes_) return;
    void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        bytes_ = 0;
        throw std::bad_alloc();
    }
    data_ = static_cast<uint8_t*>(data);
#if defined(MADV_HUGEPAGE)
    if (bytes_ >= (4u << 20)) madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
}

Block::~Block() {
    if (data_) munmap(data_, bytes_);
}

Block& Block::operator=(Block&& other) noexcept {
    if (this != &other) {
        if (data_) munmap(data_, bytes_);
        data_ = other.data_, bytes_ = other.bytes_;
        other.data_ = nullptr, other.bytes_ = 0;
    }
    return *this;
}

static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }
static int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

Cache::Cache(const Plan& plan, int sequences, int length, int chunk) : plan_(plan), length_(length) {
    size_t total = 0;
    auto take = [&](size_t bytes) {
        size_t at = total;
        total += aligned(bytes);
        return at;
    };
    for (const StoreSpec& spec : plan.stores) {
        Place place;
        // A ring has room for a whole chunk more than it promises: no token of a chunk then needs a slot that a later one takes.
        int ring = spec.keep + spec.sinks + chunk;
        place.capacity = round_up(spec.keep && ring < length ? ring : length, 32);
        place.width = round_up(spec.dim, 32);
        size_t scales = spec.codec == Codec::INT8 ? (size_t)spec.heads * place.capacity * 4 : 0;
        size_t bytes = (size_t)spec.heads * place.capacity * place.width *
                       (spec.codec == Codec::F32 ? 4 : spec.codec == Codec::BF16 ? 2 : 1);
        place.k = take(bytes), place.v = take(bytes);
        place.k_scale = take(scales), place.v_scale = take(scales);
        place.positions = take(spec.keep ? (size_t)place.capacity * 4 : 0);
        places_.push_back(place);
    }
    for (int sequence = 0; sequence < sequences; sequence++) {
        memory_.emplace_back(total ? total : 64);
        for (size_t store = 0; store < places_.size(); store++)
            if (int32_t* positions = this->positions((int)store, sequence))
                for (int slot = 0; slot < places_[store].capacity; slot++) positions[slot] = -1;
    }
}

Store Cache::view(int store, int sequence) const {
    const StoreSpec& spec = plan_.stores[store];
    const Place& place = places_[store];
    uint8_t* base = memory_[sequence].as<uint8_t>();
    Store view;
    view.codec = spec.codec;
    view.heads = spec.heads, view.dim = spec.dim, view.width = place.width, view.capacity = place.capacity;
    view.k = base + place.k, view.v = base + place.v;
    view.k_scale = reinterpret_cast<float*>(base + place.k_scale);
    view.v_scale = reinterpret_cast<float*>(base + place.v_scale);
    return view;
}

int Cache::slot(int store, int position) const {
    const StoreSpec& spec = plan_.stores[store];
    if (!spec.keep || position < spec.sinks) return position;
    return spec.sinks + (position - spec.sinks) % (places_[store].capacity - spec.sinks);
}

int32_t* Cache::positions(int store, int sequence) const {
    if (!plan_.stores[store].keep) return nullptr;
    return reinterpret_cast<int32_t*>(memory_[sequence].as<uint8_t>() + places_[store].positions);
}

}  // namespace orchard
