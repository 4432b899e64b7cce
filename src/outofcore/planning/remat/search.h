// Searches for what to recompute: simulated annealing over the gaps that may be recomputed, and a greedy search.
//
// compiled.py says what annealing minimises, selection.py what the greedy search does.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "chains.h"

namespace remat {

// The gaps of a step and what is held at its ops, when nothing is recomputed.
struct Gaps {
    Index count, free_count;
    const Index *end, *bytes, *content, *kind;  // by gap
    const Index* free;                          // the gaps that may be recomputed
    const Index *alone, *held, *before;         // by op
};

// The best state that a search saw within the limit.
struct Best {
    double seconds;      // of all chains; infinite: none was within the limit
    Index bytes;         // the most that large blocks take
    Index count;         // the gaps that are recomputed
    const Index* pairs;  // each of them, and the op before which it comes back
};

// Random numbers that are the same on every machine (splitmix64: Steele, Lea & Flood, OOPSLA 2014).
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    // Draw from [0, 1).
    double unit() {
        std::uint64_t z = (state_ += 0x9e3779b97f4a7c15U);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
        return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
    }

    // Draw from [0, bound).
    Index below(Index bound) { return static_cast<Index>(unit() * static_cast<double>(bound)); }

    Index any_of(const std::vector<Index>& values) { return values[below(static_cast<Index>(values.size()))]; }

private:
    std::uint64_t state_;
};

class Search {
public:
    Search(const Step& step, const Gaps& gaps)
        : s_(step), g_(gaps), chains_(step), kind_(gaps.kind, gaps.kind + gaps.count),
          fetch_(gaps.end, gaps.end + gaps.count), free_(gaps.free, gaps.free + gaps.free_count),
          held_(gaps.held, gaps.held + step.ops), need_(gaps.alone, gaps.alone + step.ops), next_need_(need_),
          over_(step.ops), price_(step.ops), chain_(step.ops), targets_(step.ops), lookers_(step.contents),
          readers_(step.contents), is_tracked_(step.contents) {
        double seconds = 0.0, area = 0.0;
        Index smallest = std::numeric_limits<Index>::max();
        for (const Index g : free_) {
            is_tracked_[g_.content[g]] = true;
            seconds += s_.seconds[s_.maker[g_.content[g]]];
            smallest = std::min(smallest, g_.bytes[g]);
            area += static_cast<double>(g_.bytes[g]) * static_cast<double>(g_.end[g] - s_.start[g]);
        }
        const double count = std::max(static_cast<double>(free_.size()), 1.0);
        // A chain may run dearer ops than those that make what may be recomputed.
        const double whole = std::accumulate(s_.seconds, s_.seconds + s_.ops, 0.0);
        unit_ = std::max({seconds / count, whole / std::max(static_cast<double>(s_.ops), 1.0), 1e-12});
        usual_price_ = unit_ / std::max(area / count, 1.0);
        least_part_ = free_.empty() ? 1 : std::max(smallest / kLeastPart, Index{1});
        std::fill(price_.begin(), price_.end(), usual_price_);
        for (Index op = 0; op < s_.ops; ++op) chain_[op].need = need_[op];
    }

    // Try random changes from the present state on, which is left as it is in the end.
    // It ends after so many changes, or when so many ops have been looked at.
    void run(Index limit, Index changes, Index work, double hot, std::uint64_t seed, Best& best) {
        limit_ = need_limit_ = limit, least_ = least_part_, random_ = Random(seed), work_ = 0;
        best.seconds = kAnyTime;
        measure_overload();
        if (is_within()) keep(best);
        double heat = unit_ * hot;
        for (Index turn = 1; turn <= changes && work_ < work && !free_.empty(); ++turn) {
            if (turn % kPriced == 0) {
                const double done = std::max(static_cast<double>(turn) / static_cast<double>(changes),
                                             static_cast<double>(work_) / static_cast<double>(work));
                heat = unit_ * hot * std::pow(kCold / hot, done);
                change_prices();
            }
            const double most = seconds_ + fine_ - heat * std::log(std::max(random_.unit(), 1e-12));
            const bool is_changed = random_.unit() < kSwaps ? try_swap(most) : try_change(most);
            if (is_changed && is_within() && seconds_ < best.seconds * (1 - 1e-12)) keep(best);
        }
        best.count = static_cast<Index>(best_.size() / 2);
        best.pairs = best_.data();
    }

    // Go to the state in which these gaps are recomputed.
    void restore(const Index* pairs, Index count) {
        std::vector<Index> wanted(g_.count, kNowhere);
        for (Index i = 0; i < count; ++i) wanted[pairs[2 * i]] = pairs[2 * i + 1];
        // What is kept makes more chains possible, so everything that will change is kept first.
        for (const Index g : free_)
            if (kind_[g] == kAgain && wanted[g] != fetch_[g]) set(g, kKept, g_.end[g]);
        for (const Index g : free_)
            if (kind_[g] == kKept && wanted[g] != kNowhere) set(g, kAgain, wanted[g]);
        add_seconds();
    }

    // Drop gap after gap from the present state on, whatever costs the fewest seconds per overload removed, until
    // nothing lies above the limit; and settle what runs again. It ends when so many runs of chains have been looked at.
    void drop(Index limit, Index need_limit, Index patience, Best& best) {
        begin(limit, need_limit, patience);
        using Rated = std::pair<double, Index>;
        std::priority_queue<Rated, std::vector<Rated>, std::greater<Rated>> cheapest;
        Index fetch = kNowhere;
        double rate = 0.0;
        for (const Index g : free_)
            if (rate_gap(g, rate, fetch)) cheapest.push({rate, g});
        for (Index dropped = 0; !is_within() && !cheapest.empty() && runs_ < patience_;) {
            const Index g = cheapest.top().second;
            cheapest.pop();
            if (!rate_gap(g, rate, fetch)) continue;
            // Rates hardly ever improve as others are dropped, so what is still about the best now is the best.
            if (!cheapest.empty() && rate > cheapest.top().first * kAbout) {
                cheapest.push({rate, g});
                continue;
            }
            set(g, kAgain, fetch);
            if (++dropped % kSettledEvery == 0) settle_all(1, false);
        }
        const bool fits = is_within();
        settle_all(kSettlings, true);
        finish(best, fits);
    }

    // Make every change that saves seconds and adds no overload; nothing that runs again is kept instead.
    void settle(Index limit, Index need_limit, Index patience, Best& best) {
        begin(limit, need_limit, patience);
        settle_all(kSettlings, false);
        finish(best, true);
    }

protected:
    static constexpr Index kNowhere = -1;
    // A gap whose rate is worse than the next one's by no more than this factor is dropped all the same: rates of
    // similar gaps worsen little by little, and to rate them all again and again takes most of the time.
    static constexpr double kAbout = 1.001;
    // After how many drops choices are settled, and how often all gaps are looked at in the end.
    static constexpr Index kSettledEvery = 10;
    static constexpr int kSettlings = 4;
    // The temperature in the end, in mean seconds of an op that may run again.
    static constexpr double kCold = 0.001;
    // After so many changes prices rise and fall by these factors, within these multiples of what they start from.
    static constexpr int kPriced = 50;
    static constexpr double kRise = 2.0, kFall = 0.9, kCheapest = 1e-2, kDearest = 1e4;
    // To be above the limit by a few bytes counts for this part of the smallest gap: it takes a whole gap to change.
    static constexpr Index kLeastPart = 8;
    // The share of changes that exchange two gaps.
    static constexpr double kSwaps = 0.3;
    // How many gaps a swap looks at to find a partner.
    static constexpr int kPartners = 8;
    static constexpr double kAnyTime = std::numeric_limits<double>::infinity();

    struct Chain {
        double seconds = 0.0;
        Index need = 0;           // bytes of its op with it, beside what is held over the op
        std::vector<Index> seen;   // the tracked contents that it found or makes
        double copying = 0.0;      // seconds of its copies in
        std::vector<Index> reads;  // the contents of gaps that it finds
    };

    // A chain that a change replaces, and the gaps that it fetches.
    struct Replacement {
        Index at = 0;
        Chain chain;
        std::vector<Index> targets;
    };

    // A change before it is applied, and what it takes to undo it afterwards.
    struct Change {
        Index gap = 0, kind = 0, fetch = 0, over_count = 0, added = 0;  // bytes of overload
        double seconds = 0.0, fine = 0.0;
        std::vector<Replacement> replacements;  // those in use come first
        std::size_t count = 0;
    };

    // Bytes of an op above the limit, or a little more; what it needs itself has a limit of its own.
    Index overload(Index held, Index need) const {
        const Index over = std::max(held + need - limit_, need - need_limit_);
        return over > 0 ? std::max(over, least_) : 0;
    }

    bool is_within() const { return over_count_ == 0; }

    void keep(Best& best) {
        best_.clear();
        for (const Index g : free_)
            if (kind_[g] == kAgain) best_.push_back(g), best_.push_back(fetch_[g]);
        add_seconds();
        best.seconds = seconds_;
        best.bytes = 0;
        for (Index op = 0; op < s_.ops; ++op) best.bytes = std::max(best.bytes, held_[op] + need_[op]);
    }

    void begin(Index limit, Index need_limit, Index patience) {
        limit_ = limit, need_limit_ = need_limit, least_ = 1, patience_ = patience, runs_ = 0;
        measure_overload();
    }

    void finish(Best& best, bool fits) {
        keep(best);
        if (!fits) best.seconds = kAnyTime;
        best.count = static_cast<Index>(best_.size() / 2);
        best.pairs = best_.data();
    }

    void meet(Index g) {
        meetings_.clear();
        for (const Index at : lookers_[g_.content[g]])
            if (s_.start[g] < at && at < g_.end[g]) meetings_.push_back(at);
        std::sort(meetings_.begin(), meetings_.end());
    }

    // Find the seconds per overload removed if a gap is dropped, and before which op it had best come back.
    bool rate_gap(Index g, double& rate, Index& fetch) {
        const auto begin = over_.begin() + s_.start[g] + 1, end = over_.begin() + g_.end[g];
        if (kind_[g] != kKept || std::none_of(begin, end, [](Index over) { return over > 0; })) return false;
        meet(g);
        options_.assign(1, g_.end[g]);
        if (!meetings_.empty()) options_.push_back(meetings_.front());
        if (meetings_.size() > 1) options_.push_back(meetings_.back());
        fetch = kNowhere;
        for (const Index at : options_) {
            if (!weigh(g, kAgain, at, kAnyTime, changes_[0])) continue;
            drop(changes_[0]);
            const double cost = changes_[0].seconds - seconds_, gain = static_cast<double>(-changes_[0].added);
            if (gain > 0.0 && (fetch == kNowhere || cost / gain < rate)) rate = cost / gain, fetch = at;
        }
        return fetch != kNowhere;
    }

    void settle_all(int rounds, bool may_keep) {
        for (int round = 0; round < rounds; ++round) {
            std::vector<std::pair<Index, Index>> again;
            for (const Index g : free_)
                if (kind_[g] == kAgain) again.push_back({fetch_[g], g});
            std::sort(again.begin(), again.end());
            bool is_changed = false;
            for (const auto& each : again) is_changed = settle_gap(each.second, may_keep) || is_changed;
            if (!is_changed) return;
        }
    }

    bool settle_gap(Index g, bool may_keep) {
        if (runs_ > patience_) return false;
        meet(g);
        options_ = meetings_;
        options_.push_back(g_.end[g]);
        if (may_keep) options_.insert(options_.begin(), kNowhere);
        const double before = seconds_;
        double best = 0.0;
        Index chosen = kNowhere - 1;
        for (const Index at : options_) {
            if (at == fetch_[g]) continue;
            const Change& change = changes_[0];
            const Index kind = at == kNowhere ? kKept : kAgain;
            if (!weigh(g, kind, at == kNowhere ? g_.end[g] : at, before, changes_[0])) continue;
            drop(change);
            const bool is_better = change.seconds < before * (1 - 1e-12) || change.added < 0;
            if (change.added > 0 || !is_better) continue;
            if (chosen < kNowhere || change.seconds < best) best = change.seconds, chosen = at;
        }
        if (chosen < kNowhere) return false;
        set(g, chosen == kNowhere ? kKept : kAgain, chosen == kNowhere ? g_.end[g] : chosen);
        return true;
    }

    // Add the seconds of all chains up, without what changes by and by have lost.
    void add_seconds() {
        seconds_ = 0.0;
        for (const Chain& chain : chain_) seconds_ += chain.seconds;
    }

    void measure_overload() {
        fine_ = 0.0, over_count_ = 0;
        for (Index op = 0; op < s_.ops; ++op) {
            over_[op] = overload(held_[op], need_[op]);
            over_count_ += over_[op] > 0;
            fine_ += price_[op] * static_cast<double>(over_[op]);
        }
        work_ += s_.ops;
    }

    void change_prices() {
        for (Index op = 0; op < s_.ops; ++op) {
            const double price = price_[op] * (over_[op] > 0 ? kRise : kFall);
            price_[op] = std::clamp(price, usual_price_ * kCheapest, usual_price_ * kDearest);
        }
        measure_overload();
    }

    // Try something else with one gap than what is done with it now.
    bool try_change(double most) {
        const Index g = random_.any_of(free_), end = g_.end[g];
        const bool is_again = kind_[g] == kAgain;
        options_.clear();
        if (is_again) options_.push_back(kNowhere);  // keep it
        if (!is_again || fetch_[g] != end) options_.push_back(end);
        meetings_.clear();
        for (const Index at : lookers_[g_.content[g]])
            if (s_.start[g] < at && at < end) meetings_.push_back(at);
        if (!meetings_.empty()) {
            const Index at = random_.any_of(meetings_);
            if (!is_again || fetch_[g] != at) options_.push_back(at);
        }
        if (options_.empty()) return false;
        const Index fetch = random_.any_of(options_);
        Change& change = changes_[0];
        if (!weigh(g, fetch == kNowhere ? kKept : kAgain, fetch == kNowhere ? end : fetch, most, change)) return false;
        if (change.seconds + change.fine > most) return drop(change), false;
        apply(change);
        return true;
    }

    // Try to recompute a gap that is kept and to keep one that is recomputed, both held over some op.
    bool try_swap(double most) {
        const Index g = random_.any_of(free_);
        Index other = kNowhere;
        for (int tried = 0; tried < kPartners && other == kNowhere; ++tried) {
            const Index h = random_.any_of(free_);
            const bool overlap = s_.start[h] + 1 < g_.end[g] && s_.start[g] + 1 < g_.end[h];
            if (overlap && (kind_[h] == kAgain) != (kind_[g] == kAgain)) other = h;
        }
        if (other == kNowhere) return false;
        const auto [kept, again] = kind_[g] == kAgain ? std::pair(other, g) : std::pair(g, other);
        if (!weigh(kept, kAgain, g_.end[kept], kAnyTime, changes_[0])) return false;
        apply(changes_[0]);
        if (!weigh(again, kKept, g_.end[again], most, changes_[1])) return apply(changes_[0]), false;
        if (changes_[1].seconds + changes_[1].fine > most) return drop(changes_[1]), apply(changes_[0]), false;
        apply(changes_[1]);
        return true;
    }

    // Change a gap whatever it costs.
    void set(Index g, Index kind, Index fetch) {
        if (weigh(g, kind, fetch, kAnyTime, changes_[0])) apply(changes_[0]);
    }

    Replacement& replacement(Change& change, Index at) {
        for (std::size_t i = 0; i < change.count; ++i)
            if (change.replacements[i].at == at) return change.replacements[i];
        if (change.count == change.replacements.size()) change.replacements.emplace_back();
        Replacement& found = change.replacements[change.count++];
        found.at = at;
        found.targets = targets_[at];
        return found;
    }

    // The op from which on a gap is held up to its end.
    Index held_from(Index g, Index kind, Index fetch) const { return kind == kAgain ? fetch : s_.start[g] + 1; }

    // Work a change out; false if it cannot be, or all chains take more than so many seconds then. Until it is applied
    // or dropped, next_need_ is as it would be.
    bool weigh(Index g, Index kind, Index fetch, double most, Change& change) {
        const Index old_kind = kind_[g], old_fetch = fetch_[g], start = s_.start[g];
        change.gap = g, change.kind = kind, change.fetch = fetch, change.count = 0;
        if (old_kind == kAgain) {
            std::vector<Index>& targets = replacement(change, old_fetch).targets;
            targets.erase(std::find(targets.begin(), targets.end(), g));
        }
        if (kind == kAgain) replacement(change, fetch).targets.push_back(g);
        // The chains for which it matters whether its content is there.
        const Index was = old_kind == kAgain ? old_fetch : start, now = kind == kAgain ? fetch : start;
        for (const Index at : lookers_[g_.content[g]])
            if (std::min(was, now) <= at && at <= std::max(was, now) && at > start) replacement(change, at);
        // Those that find it copy it in from home, or no longer do.
        if (old_kind == kAway || kind == kAway)
            for (const Index at : readers_[g_.content[g]])
                if (start < at && at <= g_.end[g]) replacement(change, at);
        std::sort(change.replacements.begin(), change.replacements.begin() + static_cast<std::ptrdiff_t>(change.count),
                  [](const Replacement& one, const Replacement& other) { return one.at < other.at; });
        change.seconds = seconds_;
        for (std::size_t i = 0; i < change.count; ++i) change.seconds -= chain_[change.replacements[i].at].seconds;
        kind_[g] = kind, fetch_[g] = fetch;
        bool is_possible = true;
        for (std::size_t i = 0; i < change.count && is_possible; ++i)
            is_possible = find_chain(change.replacements[i], most - change.seconds + 1e-12, change.seconds);
        kind_[g] = old_kind, fetch_[g] = old_fetch;
        if (is_possible) weigh_overload(change);
        return is_possible;
    }

    bool find_chain(Replacement& replacement, double most, double& seconds) {
        Chain& chain = replacement.chain;
        chain.seconds = 0.0, chain.need = g_.alone[replacement.at];
        chain.copying = 0.0;
        chain.seen.clear(), chain.reads.clear();
        if (replacement.targets.empty()) return true;
        contents_.clear();
        for (const Index g : replacement.targets) contents_.push_back(g_.content[g]);
        std::sort(contents_.begin(), contents_.end());
        contents_.erase(std::unique(contents_.begin(), contents_.end()), contents_.end());
        Found found;
        const Index count = static_cast<Index>(contents_.size());
        const bool is_found =
            chains_.weigh(replacement.at, count, contents_.data(), most, kind_.data(), fetch_.data(), found);
        work_ += kChainWork * chains_.runs();
        if (!is_found) return false;
        runs_ += chains_.runs();
        chains_.for_each_seen([&](Index content) {
            if (is_tracked_[content]) chain.seen.push_back(content);
            if (!counts_overload_ && is_read(content)) chain.reads.push_back(content);
        });
        for (const Index content : chains_.from_home()) chain.copying += s_.home_seconds[content];
        chain.seconds = found.seconds;
        chain.need = std::max(chain.need, g_.before[replacement.at] - found.held + found.bytes);
        seconds += found.seconds;
        return true;
    }

    // Whether the chain found last finds the content of a gap that could be elsewhere.
    bool is_read(Index content) const {
        return s_.gaps_from[content] < s_.gaps_from[content + 1] && !chains_.makes(content);
    }

    // The range of ops over which a change holds more, or fewer, bytes of its gap.
    struct Range {
        Index first, last, more;
    };
    Range range_of(const Change& change) const {
        const Index g = change.gap;
        const Index was = held_from(g, kind_[g], fetch_[g]), now = held_from(g, change.kind, change.fetch);
        return {std::min(was, now), std::max(was, now), now < was ? g_.bytes[g] : -g_.bytes[g]};
    }

    void weigh_overload(Change& change) {
        if (!counts_overload_) return;
        const auto [first, last, more] = range_of(change);
        change.fine = fine_, change.over_count = over_count_, change.added = 0;
        const auto look = [&](Index op, Index added) {
            const Index over = overload(held_[op] + added, next_need_[op]);
            if (over == over_[op]) return;
            change.over_count += (over > 0) - (over_[op] > 0);
            change.fine += price_[op] * static_cast<double>(over - over_[op]);
            change.added += over - over_[op];
        };
        for (std::size_t i = 0; i < change.count; ++i) {
            const Replacement& each = change.replacements[i];
            next_need_[each.at] = each.chain.need;
            if (each.at < first || last <= each.at) look(each.at, 0);
        }
        for (Index op = first; op < last; ++op) look(op, more);
        work_ += kChangeWork + last - first;
    }

    void drop(const Change& change) {
        for (std::size_t i = 0; i < change.count; ++i)
            next_need_[change.replacements[i].at] = need_[change.replacements[i].at];
    }

    // Apply a change. It then holds the state before, so that applying it once more undoes it.
    void apply(Change& change) {
        const auto [first, last, more] = range_of(change);
        for (std::size_t i = 0; i < change.count; ++i) {
            Replacement& each = change.replacements[i];
            for (const Index content : chain_[each.at].seen) {
                std::vector<Index>& lookers = lookers_[content];
                *std::find(lookers.begin(), lookers.end(), each.at) = lookers.back();
                lookers.pop_back();
            }
            for (const Index content : each.chain.seen) lookers_[content].push_back(each.at);
            for (const Index content : chain_[each.at].reads) {
                std::vector<Index>& readers = readers_[content];
                *std::find(readers.begin(), readers.end(), each.at) = readers.back();
                readers.pop_back();
            }
            for (const Index content : each.chain.reads) readers_[content].push_back(each.at);
            std::swap(chain_[each.at], each.chain);
            std::swap(targets_[each.at], each.targets);
            need_[each.at] = next_need_[each.at] = chain_[each.at].need;
        }
        if (counts_overload_) {
            for (Index op = first; op < last; ++op) {
                held_[op] += more;
                over_[op] = overload(held_[op], need_[op]);
            }
            for (std::size_t i = 0; i < change.count; ++i) {
                const Index at = change.replacements[i].at;
                over_[at] = overload(held_[at], need_[at]);
            }
        }
        std::swap(kind_[change.gap], change.kind);
        std::swap(fetch_[change.gap], change.fetch);
        std::swap(seconds_, change.seconds);
        std::swap(fine_, change.fine);
        std::swap(over_count_, change.over_count);
        work_ += last - first;
    }

    // What an op of a chain, and a change, count for beside an op that is looked at.
    static constexpr Index kChainWork = 16, kChangeWork = 64;

    const Step s_;
    const Gaps g_;
    Chains chains_;
    std::vector<Index> kind_, fetch_;  // by gap
    const std::vector<Index> free_;
    std::vector<Index> held_, need_, next_need_, over_;      // by op
    std::vector<double> price_;                              // by op, seconds for a byte above the limit
    std::vector<Chain> chain_;                               // by op
    std::vector<std::vector<Index>> targets_;                // by op, the gaps that are fetched there
    std::vector<std::vector<Index>> lookers_;                // by content, the ops whose chains found or make it
    std::vector<std::vector<Index>> readers_;                // by content, the ops whose chains find it
    std::vector<char> is_tracked_;                           // by content, whether a gap of it may be recomputed
    bool counts_overload_ = true;                            // what a chain reads is recorded only if not
    std::vector<Index> options_, meetings_, contents_, best_;
    Change changes_[2];
    Random random_{0};
    double unit_ = 0.0, usual_price_ = 0.0, seconds_ = 0.0, fine_ = 0.0;
    Index limit_ = 0, need_limit_ = 0, least_ = 0, least_part_ = 0, over_count_ = 0;
    Index work_ = 0, runs_ = 0, patience_ = 0;  // ops that annealing, and runs that the greedy search, looked at; and may
};

}  // namespace remat
