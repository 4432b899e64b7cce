// Compares Ranking with sorting all items for each question. Prints "ok", or what differs.

#include "ranking.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

struct Item {
  int64_t next = 0, offset = 0;
  follow::Rank rank;
};

int main() {
  std::mt19937_64 draw(3);
  const auto below = [&](int64_t end) { return static_cast<int64_t>(draw() % static_cast<uint64_t>(end)); };
  for (int round = 0; round < 200; ++round) {
    follow::Ranking<Item> ranking;
    std::vector<std::unique_ptr<Item>> items;
    for (int step = 0; step < 300; ++step) {
      const int64_t what = below(10);
      if (what < 3 || items.empty()) {
        items.push_back(std::make_unique<Item>(Item{below(40), below(1000000), {}}));
        ranking.add(items.back().get());
      } else if (what < 5) {
        const size_t place = static_cast<size_t>(below(static_cast<int64_t>(items.size())));
        ranking.remove(items[place].get());
        items.erase(items.begin() + static_cast<int64_t>(place));
      } else if (what < 7) {
        Item& item = *items[static_cast<size_t>(below(static_cast<int64_t>(items.size())))];
        item.next = below(40);
        ranking.touch(&item);
      } else if (what < 8) {  // nobody says that it is used sooner
        Item& item = *items[static_cast<size_t>(below(static_cast<int64_t>(items.size())))];
        item.next = below(item.next + 1);
      } else if (what < 9) {
        for (auto& item : items) item->next = below(40);
        ranking.touch_all();
      }
      std::vector<Item*> sorted;
      for (auto& item : items) sorted.push_back(item.get());
      std::sort(sorted.begin(), sorted.end(), [](const Item* a, const Item* b) {
        return a->next != b->next ? a->next > b->next : a->offset < b->offset;
      });
      size_t most = static_cast<size_t>(below(static_cast<int64_t>(items.size()) + 1)), seen = 0;
      bool same = true;
      ranking.visit([](const Item& item) { return item.next; }, [](const Item& item) { return item.offset; },
                    [&](Item& item) {
                      if (seen == most) return false;
                      same &= seen < sorted.size() && sorted[seen] == &item;
                      ++seen;
                      return true;
                    });
      if (!same || seen != std::min(most, sorted.size()) || ranking.size() != items.size()) {
        std::printf("round %d, step %d: another order\n", round, step);
        return 1;
      }
    }
  }
  std::puts("ok");
}
