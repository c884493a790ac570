#include <cstdlib>
#include <cstring>
#include <initializer_list>
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

// Calls visit(inside, offset, bytes) for the runs of bytes in a sequence's memory that hold its first `tokens` tokens, and where
// each begins in a copy of `held` tokens. Slots of a store that keeps everything are copied in whole blocks of 32.
template <class Visit>
void Cache::pieces(int sequence, int tokens, int held, const Visit& visit) const {
    size_t at = 0;
    uint8_t* base = memory_[sequence].as<uint8_t>();
    for (size_t number = 0; number < places_.size(); number++) {
        const StoreSpec& spec = plan_.stores[number];
        const Place& place = places_[number];
        const size_t element = spec.codec == Codec::F32 ? 4 : spec.codec == Codec::BF16 ? 2 : 1, slot_bytes = place.width * element;
        if (!spec.keep) {
            const size_t used = round_up(tokens, 32), kept = round_up(held, 32), head_bytes = (size_t)place.capacity * slot_bytes;
            for (size_t array : {place.k, place.v})
                for (int head = 0; head < spec.heads; head++, at += kept * slot_bytes)
                    visit(base + array + head * head_bytes, at, used * slot_bytes);
            if (spec.codec != Codec::INT8) continue;
            for (size_t array : {place.k_scale, place.v_scale})
                for (int head = 0; head < spec.heads; head++, at += kept * 4)
                    visit(base + array + (size_t)head * place.capacity * 4, at, used * 4);
            continue;
        }
        // A ring: slot by slot, as the rings of two caches may have different sizes. Keys of a block of 16 slots lie side by side,
        // pairs of channels apart (float32: channels), values of a pair of slots likewise.
        for (int position = 0; position < tokens; position++) {
            if (position >= spec.sinks && position < tokens - spec.keep) continue;
            const int slot = this->slot((int)number, position);
            for (int head = 0; head < spec.heads; head++) {
                const size_t start = (size_t)head * place.capacity * slot_bytes;
                const bool wide = spec.codec == Codec::F32;
                uint8_t* key = base + place.k + start + (size_t)(slot / 16) * 16 * slot_bytes + slot % 16 * element * (wide ? 1 : 2);
                const int steps = wide ? place.width : place.width / 2, step_bytes = (int)(wide ? 4 : 2 * element);
                for (int c = 0; c < steps; c++, at += step_bytes) visit(key + (size_t)c * 16 * step_bytes, at, step_bytes);
                uint8_t* value = base + place.v + start + (wide ? slot * slot_bytes : slot / 2 * 2 * slot_bytes + slot % 2 * element);
                if (wide) {
                    visit(value, at, slot_bytes);
                    at += slot_bytes;
                } else {
                    for (int c = 0; c < place.width; c++, at += element) visit(value + c * 2 * element, at, element);
                }
                if (spec.codec != Codec::INT8) continue;
                for (size_t array : {place.k_scale, place.v_scale}) {
                    visit(base + array + ((size_t)head * place.capacity + slot) * 4, at, 4);
                    at += 4;
                }
            }
        }
    }
}

size_t Cache::bytes(int tokens) const {
    size_t total = 0;
    pieces(0, tokens, tokens, [&](uint8_t*, size_t at, size_t bytes) { total = at + bytes; });
    return total;
}

void Cache::take(int sequence, int tokens, uint8_t* to) const {
    pieces(sequence, tokens, tokens, [&](uint8_t* inside, size_t at, size_t bytes) { std::memcpy(to + at, inside, bytes); });
}

void Cache::put(int sequence, int tokens, int held, const uint8_t* from) {
    pieces(sequence, tokens, held, [&](uint8_t* inside, size_t at, size_t bytes) { std::memcpy(inside, from + at, bytes); });
    for (size_t store = 0; store < places_.size(); store++)
        if (int32_t* table = positions((int)store, sequence)) {
            const StoreSpec& spec = plan_.stores[store];
            for (int position = 0; position < tokens; position++)
                if (position < spec.sinks || position >= tokens - spec.keep) table[slot((int)store, position)] = position;
        }
}

}  // namespace orchard
