#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <new>
#include <system_error>
#include <thread>

#if !defined(_WIN32)
#include <sys/mman.h>
#endif

#include "engine.h"
#include "kept.h"

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

constexpr size_t LEAST_SPARE = 256u << 10, MOST_SPARE = 512u << 20;  // bytes of memory that is kept for later
constexpr size_t MUCH = 4u << 20;

static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }
static int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

constexpr int MORE_TOKENS = 512;  // memory is taken for at least so many tokens more than there are, if they are allowed

static size_t element_bytes(Codec codec) { return codec == Codec::F32 ? 4 : codec == Codec::BF16 ? 2 : 1; }

// Of one head: keys, and values.
static size_t k_slot_bytes(const StoreSpec& spec, int width) { return spec.books ? spec.books->key_bytes() : width * element_bytes(spec.codec); }
static size_t v_slot_bytes(const StoreSpec& spec, int width) { return spec.books ? spec.books->value_bytes() : width * element_bytes(spec.codec); }
static size_t exact_bytes(const StoreSpec& spec) { return spec.books ? spec.books->exact_floats() * 4 : 0; }

// Never just enough: what has its prompt will go on. A quarter more each time, so that what is copied stays in proportion.
static int with_room(int tokens) {
    const int more = tokens / 4 > MORE_TOKENS ? tokens / 4 : MORE_TOKENS;
    return tokens < (1 << 30) ? round_up(tokens + more, 64) : tokens;
}

Cache::Cache(const Plan& plan, int sequences, int length, int chunk) : plan_(plan), chunk_(chunk), sequences_(sequences) {
    for (int sequence = 0; length && sequence < sequences; sequence++) {
        open(sequence, length);
        take_memory(sequence, length);
    }
}

void Cache::open(int sequence, int length) {
    sequences_[sequence] = Sequence();
    sequences_[sequence].length = length;
    if (length > longest_) longest_ = length;
}

void Cache::release(int sequence) {
    spare(std::move(sequences_[sequence].memory));
    sequences_[sequence] = Sequence();
    longest_ = 0;
    for (const Sequence& other : sequences_) longest_ = other.length > longest_ ? other.length : longest_;
}

void Cache::spare(Block memory) {
    if (memory.bytes() < LEAST_SPARE || spare_bytes_ + memory.bytes() > MOST_SPARE) return;
#if defined(MADV_FREE)
    madvise(memory.as<void>(), memory.bytes(), MADV_FREE);
#endif
    spare_bytes_ += memory.bytes();
    spare_.push_back(std::move(memory));
}

Block Cache::some_memory(size_t bytes) {
    for (size_t at = spare_.size(); at-- > 0;)
        if (spare_[at].bytes() >= bytes && spare_[at].bytes() <= 2 * bytes) {
            Block found = std::move(spare_[at]);
            spare_.erase(spare_.begin() + (long)at);
            spare_bytes_ -= found.bytes();
            return found;
        }
    return Block(bytes);
}

// Where everything lies in the memory of a sequence of so many tokens; answers how many bytes that is.
size_t Cache::arrange(int tokens, std::vector<Place>& places) const {
    size_t total = 0;
    auto take = [&](size_t bytes) {
        size_t at = total;
        total += aligned(bytes);
        return at;
    };
    places.clear();
    for (const StoreSpec& spec : plan_.stores) {
        Place place;
        // A ring has room for a whole chunk more than it promises: no token of a chunk then needs a slot that a later one takes.
        int ring = spec.keep + spec.sinks + chunk_;
        place.capacity = round_up(spec.keep && ring < tokens ? ring : tokens, 32);
        place.width = round_up(spec.dim, 32);
        size_t scales = spec.codec == Codec::INT8 ? (size_t)spec.heads * place.capacity * 4 : 0;
        const size_t slots = (size_t)spec.heads * place.capacity;
        const size_t behind = spec.books ? 8 : 0;  // codes are read eight at a time
        place.k = take(slots * k_slot_bytes(spec, place.width) + behind), place.v = take(slots * v_slot_bytes(spec, place.width) + behind);
        place.exact = take(exact_bytes(spec));
        place.k_scale = take(scales), place.v_scale = take(scales);
        place.positions = take(spec.keep ? (size_t)place.capacity * 4 : 0);
        places.push_back(place);
    }
    return total ? total : 64;
}

size_t Cache::memory(int tokens) const {
    std::vector<Place> places;
    return arrange(with_room(tokens), places);
}

size_t Cache::memory() const {
    size_t total = 0;
    for (const Sequence& sequence : sequences_) total += sequence.memory.bytes() + (sequence.kept ? sequence.kept->memory() : 0);
    return total;
}

void Cache::take_memory(int sequence, int tokens) {
    Sequence fresh, &old = sequences_[sequence];
    fresh.memory = some_memory(arrange(tokens, fresh.places));
    fresh.length = old.length, fresh.capacity = tokens;
    for (size_t store = 0; store < plan_.stores.size(); store++)
        if (plan_.stores[store].keep) {
            const Place& place = fresh.places[store];
            int32_t* positions = reinterpret_cast<int32_t*>(fresh.memory.as<uint8_t>() + place.positions);
            for (int slot = 0; slot < place.capacity; slot++) positions[slot] = -1;
        }
    if (old.capacity) copy_slots(old, fresh, old.capacity);
    old = std::move(fresh);
}

void Cache::grow(int sequence, int tokens) {
    const int room = with_room(tokens), length = sequences_[sequence].length;
    take_memory(sequence, room < length ? room : length);
}

// All slots that hold the first tokens, and of a ring all slots: up to its own size a ring has every position in the slot of
// that number, so it can grow until then.
void Cache::copy_store(int number, const Sequence& from, Sequence& to, int tokens) const {
    const StoreSpec& spec = plan_.stores[number];
    const Place &source = from.places[number], &target = to.places[number];
    size_t slots = round_up(tokens, 32);
    if (slots > (size_t)source.capacity) slots = source.capacity;
    if (slots > (size_t)target.capacity) slots = target.capacity;
    const uint8_t* read = from.memory.as<uint8_t>();
    uint8_t* write = to.memory.as<uint8_t>();
    auto all_heads = [&](size_t source_at, size_t target_at, size_t slot_bytes) {
        for (int head = 0; head < spec.heads; head++)
            std::memcpy(write + target_at + head * target.capacity * slot_bytes, read + source_at + head * source.capacity * slot_bytes,
                        slots * slot_bytes);
    };
    all_heads(source.k, target.k, k_slot_bytes(spec, source.width)), all_heads(source.v, target.v, v_slot_bytes(spec, source.width));
    if (exact_bytes(spec)) std::memcpy(write + target.exact, read + source.exact, exact_bytes(spec));
    if (spec.codec == Codec::INT8) all_heads(source.k_scale, target.k_scale, 4), all_heads(source.v_scale, target.v_scale, 4);
    if (spec.keep) std::memcpy(write + target.positions, read + source.positions, slots * 4);
}

// Much of it is copied by two threads: one alone does not use all of the memory's bandwidth, nor take pages quickly.
void Cache::copy_slots(const Sequence& from, Sequence& to, int tokens) const {
    const int count = (int)from.places.size(), half = count / 2;
    auto some = [&](int first, int last) {
        for (int number = first; number < last; number++) copy_store(number, from, to, tokens);
    };
    if (to.memory.bytes() < MUCH || half == 0) return some(0, count);
    std::thread helper;
    try {
        helper = std::thread(some, 0, half);
    } catch (const std::system_error&) {  // no thread to be had
        some(0, half);
    }
    some(half, count);
    if (helper.joinable()) helper.join();
}

bool Cache::copy(int source, int target, int tokens) {
    const Sequence& from = sequences_[source];
    if (from.kept || sequences_[target].kept) return false;
    if (tokens > from.capacity || tokens >= sequences_[target].length) return false;
    for (size_t store = 0; store < plan_.stores.size(); store++)  // the positions that a later token may look at
        if (const int32_t* table = positions((int)store, source)) {
            const StoreSpec& spec = plan_.stores[store];
            for (int position = 0; position < tokens; position++)
                if ((position < spec.sinks || position >= tokens - spec.keep) && table[slot((int)store, source, position)] != position)
                    return false;
        }
    bool rings = false;
    for (const StoreSpec& spec : plan_.stores) rings = rings || spec.keep;
    reserve(target, tokens);
    Sequence& to = sequences_[target];
    if (!rings) {
        copy_slots(from, to, tokens);
        return true;
    }
    std::vector<uint8_t> between(bytes(tokens));
    take(source, tokens, between.data());
    put(target, tokens, tokens, between.data());
    return true;
}

Cache::Look Cache::look(int store, int sequence, int head) const {
    if (const Kept* kept = sequences_[sequence].kept.get()) return {kept->view(store, head), 0, kept->base(store, head)};
    return {view(store, sequence), head, 0};
}

void Cache::budget(int sequence, std::shared_ptr<Kept> kept) {
    release(sequence);
    sequences_[sequence].kept = std::move(kept);
    bound(sequence);
}

void Cache::bound(int sequence) {
    Sequence& changed = sequences_[sequence];
    changed.length = changed.capacity = changed.kept->limit();
    longest_ = 0;
    for (const Sequence& other : sequences_) longest_ = other.length > longest_ ? other.length : longest_;
}

Store Cache::view(int store, int sequence) const {
    if (const Kept* kept = sequences_[sequence].kept.get()) return kept->largest(store);
    const StoreSpec& spec = plan_.stores[store];
    const Place& place = sequences_[sequence].places[store];
    uint8_t* base = sequences_[sequence].memory.as<uint8_t>();
    Store view;
    view.codec = spec.codec;
    view.heads = spec.heads, view.dim = spec.dim, view.width = place.width, view.capacity = place.capacity;
    view.k = base + place.k, view.v = base + place.v;
    view.k_scale = reinterpret_cast<float*>(base + place.k_scale);
    view.v_scale = reinterpret_cast<float*>(base + place.v_scale);
    view.books = spec.books.get();
    view.exact = reinterpret_cast<float*>(base + place.exact);
    return view;
}

int Cache::slot_of(int store, const Place& place, int position) const {
    const StoreSpec& spec = plan_.stores[store];
    if (!spec.keep || position < spec.sinks) return position;
    return spec.sinks + (position - spec.sinks) % (place.capacity - spec.sinks);
}

int Cache::slot(int store, int sequence, int position) const {
    if (!plan_.stores[store].keep) return position;  // also of a sequence under a budget, counted from its base
    return slot_of(store, sequences_[sequence].places[store], position);
}

int32_t* Cache::positions(int store, int sequence) const {
    if (!plan_.stores[store].keep) return nullptr;
    const Sequence& found = sequences_[sequence];
    return reinterpret_cast<int32_t*>(found.memory.as<uint8_t>() + found.places[store].positions);
}

// Calls visit(inside, offset, bytes) for the runs of bytes in a sequence's memory that hold its first `tokens` tokens, and where
// each begins in a copy of `held` tokens. Slots of a store that keeps everything are copied in whole blocks of 32.
template <class Visit>
void Cache::pieces(const Sequence& sequence, int tokens, int held, const Visit& visit) const {
    size_t at = 0;
    uint8_t* base = sequence.memory.as<uint8_t>();
    for (size_t number = 0; number < plan_.stores.size(); number++) {
        const StoreSpec& spec = plan_.stores[number];
        const Place& place = sequence.places[number];
        const size_t element = element_bytes(spec.codec), slot_bytes = place.width * element;
        if (!spec.keep) {
            const size_t used = round_up(tokens, 32), kept = round_up(held, 32);
            auto side = [&](size_t array, size_t bytes) {
                for (int head = 0; head < spec.heads; head++, at += kept * bytes)
                    visit(base + array + (size_t)head * place.capacity * bytes, at, used * bytes);
            };
            side(place.k, k_slot_bytes(spec, place.width)), side(place.v, v_slot_bytes(spec, place.width));
            if (exact_bytes(spec)) visit(base + place.exact, at, exact_bytes(spec));
            at += exact_bytes(spec);
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
            const int slot = slot_of((int)number, place, position);
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
    Sequence imagined;  // only its places count
    arrange(tokens, imagined.places);
    pieces(imagined, tokens, tokens, [&](uint8_t*, size_t at, size_t bytes) { total = at + bytes; });
    return total;
}

void Cache::take(int sequence, int tokens, uint8_t* to) const {
    pieces(sequences_[sequence], tokens, tokens, [&](uint8_t* inside, size_t at, size_t bytes) { std::memcpy(to + at, inside, bytes); });
}

void Cache::put(int sequence, int tokens, int held, const uint8_t* from) {
    reserve(sequence, tokens);
    pieces(sequences_[sequence], tokens, held, [&](uint8_t* inside, size_t at, size_t bytes) { std::memcpy(inside, from + at, bytes); });
    for (size_t store = 0; store < plan_.stores.size(); store++)
        if (int32_t* table = positions((int)store, sequence)) {
            const StoreSpec& spec = plan_.stores[store];
            for (int position = 0; position < tokens; position++)
                if (position < spec.sinks || position >= tokens - spec.keep) table[slot((int)store, sequence, position)] = position;
        }
}

}  // namespace orchard
