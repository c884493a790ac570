#include "kept.h"

#include <system_error>
#include <thread>

#include "kept_slots.h"

namespace orchard {
namespace {

constexpr int GRAIN = 32;  // capacities are multiples of it

int rounded(int slots) { return (slots + GRAIN - 1) / GRAIN * GRAIN; }
size_t element_bytes(Codec codec) { return codec == Codec::F32 ? 4 : codec == Codec::BF16 ? 2 : 1; }

}  // namespace

Kept::Kept(const Plan& plan, const int32_t* budgets, int block, int scratch)
    : plan_(plan), block_(block), scratch_(scratch), rotaries_(plan.stores.size(), nullptr) {
    for (const Step& step : plan.steps)
        if (step.kind == StepKind::Attend && step.k >= 0 && step.rotary >= 0) rotaries_[step.store] = &plan.rotaries[step.rotary];
    areas_ = arrange(budgets, scratch, nullptr);
    memory_ = Block(areas_.empty() ? 64 : areas_.back().end);
}

// Where everything lies when heads have so many tokens (null: none). What a store's heads do not hold is shared out evenly: each
// then has room for at least as many rows as the store as a whole.
std::vector<Kept::Area> Kept::arrange(const int32_t* budgets, int scratch, const int32_t* counts) const {
    std::vector<Area> areas;
    size_t total = 0;
    int longest = 0, heads_before = 0;
    auto take = [&](size_t bytes) {
        const size_t at = total;
        total += (bytes + 63) / 64 * 64;
        return at;
    };
    for (const StoreSpec& spec : plan_.stores)
        for (int head = 0; head < spec.heads; head++, heads_before++)
            if (counts && counts[heads_before] > longest) longest = counts[heads_before];
    heads_before = 0;
    for (size_t number = 0; number < plan_.stores.size(); number++) {
        const StoreSpec& spec = plan_.stores[number];
        Area area;
        area.budget = budgets[number], area.width = rounded(spec.dim);
        area.slots = spec.heads * rounded(area.budget + block_ + scratch + GRAIN);
        const size_t bytes = (size_t)area.slots * area.width * element_bytes(spec.codec);
        const size_t scales = spec.codec == Codec::INT8 ? (size_t)area.slots * 4 : 0;
        area.k = take(bytes), area.v = take(bytes), area.k_scale = take(scales), area.v_scale = take(scales);
        area.moved = take((size_t)area.slots * 4);
        area.end = total;
        int held = 0;
        for (int head = 0; counts && head < spec.heads; head++) held += counts[heads_before + head];
        const int more = (area.slots - held) / spec.heads;
        size_t slot = 0;
        for (int head = 0; head < spec.heads; head++) {
            const int count = counts ? counts[heads_before + head] : 0;
            area.heads.push_back({slot, (count + more) / GRAIN * GRAIN, longest - count});
            slot += area.heads.back().capacity;
        }
        heads_before += spec.heads;
        areas.push_back(std::move(area));
    }
    return areas;
}

Store Kept::view(const Area& area, const Head& head, const StoreSpec& spec, uint8_t* memory) const {
    const size_t slot_bytes = area.width * element_bytes(spec.codec);
    Store view;
    view.codec = spec.codec;
    view.heads = 1, view.dim = spec.dim, view.width = area.width, view.capacity = head.capacity;
    view.k = memory + area.k + head.slot * slot_bytes, view.v = memory + area.v + head.slot * slot_bytes;
    view.k_scale = reinterpret_cast<float*>(memory + area.k_scale) + (spec.codec == Codec::INT8 ? head.slot : 0);
    view.v_scale = reinterpret_cast<float*>(memory + area.v_scale) + (spec.codec == Codec::INT8 ? head.slot : 0);
    return view;
}

int32_t* Kept::moved(const Area& area, const Head& head, uint8_t* memory) const {
    return reinterpret_cast<int32_t*>(memory + area.moved) + head.slot;
}

Store Kept::view(int store, int head) const {
    const Area& area = areas_[store];
    return view(area, area.heads[head], plan_.stores[store], memory_.as<uint8_t>());
}

Store Kept::largest(int store) const {
    Store found = view(store, 0);
    for (const Head& head : areas_[store].heads) found.capacity = head.capacity > found.capacity ? head.capacity : found.capacity;
    return found;
}

int Kept::limit() const {
    int least = INT32_MAX;
    for (const Area& area : areas_)
        for (const Head& head : area.heads) least = head.base + head.capacity < least ? head.base + head.capacity : least;
    return least;
}

int Kept::room() const {
    int least = INT32_MAX;
    for (const Area& area : areas_) {
        const int heads = (int)area.heads.size();
        int held = 0;
        for (const Head& head : area.heads) held += tokens_ - head.base;
        const int here = (heads * (area.budget + block_) - held) / heads;
        least = here < least ? here : least;
    }
    return least;
}

bool Kept::keep(int tokens) {
    if (tokens < 0 || tokens > room()) return false;
    for (const Area& area : areas_)
        for (const Head& head : area.heads)
            std::memset(moved(area, head, memory_.as<uint8_t>()) + tokens_ - head.base, 0, (size_t)tokens * 4);
    tokens_ += tokens;
    return true;
}

bool Kept::back(int tokens) {
    if (tokens < 0) return false;
    for (const Area& area : areas_)
        for (const Head& head : area.heads)
            if (tokens > tokens_ - head.base) return false;
    tokens_ -= tokens;
    return true;
}

// Slots of one store to where they belong now. `shift`: what positions change by for the last token of every head.
void Kept::move(int store, const Area& from, uint8_t* read, const Area& to, uint8_t* write, const int32_t* slots, int shift) const {
    const StoreSpec& spec = plan_.stores[store];
    std::vector<float> key(spec.dim), value(spec.dim);
    Turns turn(rotaries_[store], spec.codec);
    for (size_t head = 0; head < to.heads.size(); head++) {
        const Store source = view(from, from.heads[head], spec, read), target = view(to, to.heads[head], spec, write);
        const int32_t* before = moved(from, from.heads[head], read);
        int32_t* after = moved(to, to.heads[head], write);
        const int count = tokens_ + shift - to.heads[head].base;
        for (int place = 0; place < count; place++) {  // a slot never moves up: in place, nothing is overwritten before it is read
            const int slot = slots[place], by = to.heads[head].base + place - from.heads[head].base - slot;
            if (source.k == target.k && slot == place && by == 0) continue;
            read_slot(source, slot, key.data(), value.data());
            turn(key.data(), before[slot], before[slot] + by);
            after[place] = before[slot] + by;
            write_slot(source, slot, target, place, key.data(), value.data(), turn.half());
        }
        slots += count;
    }
}

void Kept::compact(const int32_t* counts, const int32_t* slots, const int32_t* budgets, int scratch, int threads) {
    std::vector<Area> areas = arrange(budgets, scratch, counts);
    int longest = 0;
    std::vector<const int32_t*> first;  // slots of each store
    for (const StoreSpec& spec : plan_.stores) {
        first.push_back(slots);
        for (int head = 0; head < spec.heads; head++, counts++) slots += *counts, longest = *counts > longest ? *counts : longest;
    }
    const int shift = longest - tokens_, stores = (int)areas.size();
    bool same = true;  // whether every store stays in its own memory
    for (int store = 0; store < stores; store++) same = same && areas[store].end == areas_[store].end;
    auto stays = [&](int store) {  // whether its heads have their places already
        const std::vector<Head> &from = areas_[store].heads, &to = areas[store].heads;
        for (size_t head = 0; head < to.size(); head++)
            if (from[head].slot != to[head].slot || from[head].capacity != to[head].capacity) return false;
        return true;
    };
    // All memory is taken before anything changes: what fails then leaves everything as it was.
    const int parts = threads < 1 ? 1 : threads < stores ? threads : stores > 0 ? stores : 1;
    Block fresh;
    std::vector<Block> copies(parts);  // of a store whose heads change places
    if (!same) fresh = Block(areas.back().end);
    for (int part = 0; same && part < parts; part++)
        for (int store = stores * part / parts; store < stores * (part + 1) / parts; store++)
            if (!stays(store)) copies[part].reserve(areas_[store].end - areas_[store].k);
    uint8_t *read = memory_.as<uint8_t>(), *write = same ? read : fresh.as<uint8_t>();
    auto some = [&](int part) {
        for (int store = stores * part / parts; store < stores * (part + 1) / parts; store++) {
            const Area& from = areas_[store];
            uint8_t* source = read;
            if (same && !stays(store)) {
                source = copies[part].as<uint8_t>() - from.k;
                std::memcpy(source + from.k, read + from.k, from.end - from.k);
            }
            move(store, from, source, areas[store], write, first[store], shift);
        }
    };
    std::vector<std::thread> team;
    try {
        for (int part = 1; part < parts; part++) team.emplace_back(some, part);
    } catch (const std::system_error&) {  // no thread to be had
    }
    some(0);
    for (int part = (int)team.size() + 1; part < parts; part++) some(part);
    for (std::thread& helper : team) helper.join();
    areas_ = std::move(areas);
    if (!same) memory_ = std::move(fresh);
    scratch_ = scratch;
    tokens_ = longest;
}

void Kept::read(int store, int head, float* k, float* v) const {
    const Store from = view(store, head);
    for (int slot = 0; slot < count(store, head); slot++)
        read_slot(from, slot, k ? k + (size_t)slot * from.dim : nullptr, v ? v + (size_t)slot * from.dim : nullptr);
}

// Calls visit(inside, bytes) for every run of bytes that is kept, in whole blocks of slots.
template <class Visit>
void Kept::pieces(const Visit& visit) const {
    for (size_t store = 0; store < areas_.size(); store++)
        for (size_t head = 0; head < areas_[store].heads.size(); head++) {
            const Store here = view((int)store, (int)head);
            const size_t slots = rounded(count((int)store, (int)head)), slot_bytes = here.width * element_bytes(here.codec);
            visit(here.k, slots * slot_bytes), visit(here.v, slots * slot_bytes);
            visit(reinterpret_cast<uint8_t*>(moved(areas_[store], areas_[store].heads[head], memory_.as<uint8_t>())), slots * 4);
            if (here.codec != Codec::INT8) continue;
            visit(reinterpret_cast<uint8_t*>(here.k_scale), slots * 4), visit(reinterpret_cast<uint8_t*>(here.v_scale), slots * 4);
        }
}

size_t Kept::bytes(const int32_t* counts) const {
    size_t total = 0;
    for (const StoreSpec& spec : plan_.stores)
        for (int head = 0; head < spec.heads; head++, counts++) {
            const size_t scales = spec.codec == Codec::INT8 ? 4 : 0;
            total += (size_t)rounded(*counts) * (2 * (rounded(spec.dim) * element_bytes(spec.codec) + scales) + 4);
        }
    return total;
}

void Kept::take(uint8_t* to) const {
    pieces([&](uint8_t* inside, size_t bytes) { std::memcpy(to, inside, bytes), to += bytes; });
}

void Kept::put(const int32_t* counts, const uint8_t* from) {
    std::vector<int32_t> budgets;
    for (const Area& area : areas_) budgets.push_back(area.budget);
    areas_ = arrange(budgets.data(), scratch_, counts);
    tokens_ = 0;
    for (const StoreSpec& spec : plan_.stores)
        for (int head = 0; head < spec.heads; head++, counts++) tokens_ = *counts > tokens_ ? *counts : tokens_;
    pieces([&](uint8_t* inside, size_t bytes) { std::memcpy(inside, from, bytes), from += bytes; });
}

}  // namespace orchard
