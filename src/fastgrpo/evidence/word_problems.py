"""Word problems in the style of GSM8K, written for this project: the built-in prompts of the benches.

They are here so that a bench needs no data set. None is taken from one, and no policy is trained or judged on them; a
draft may be.
"""

from __future__ import annotations

# (question, answer)
PROBLEMS: tuple[tuple[str, str], ...] = (
    (
        "Mira bakes 4 trays of rolls with 18 rolls on each tray. She gives 25 rolls to a neighbour and packs the rest "
        "into bags of 6, using as many full bags as she can. How many full bags does she have?",
        "7",
    ),
    (
        "A ferry carries 36 cars on each crossing and makes 9 crossings on Friday. On Saturday it makes 3 more "
        "crossings than on Friday, but leaves 5 places empty each time. How many cars does it carry on both days?",
        "696",
    ),
    (
        "Tomas reads 22 pages every weekday and 35 pages on each day of the weekend. His book has 540 pages. How many "
        "pages are left after two full weeks?",
        "180",
    ),
    (
        "A florist buys 150 tulips at $0.40 each and sells them in bunches of 10 for $7.50 a bunch. If she sells every "
        "bunch, how many dollars of profit does she make?",
        "52.5",
    ),
    ("A rope of 84 metres is cut into 3 pieces. The second is twice the first, and the third is as long as the other "
     "two together. How many metres long is the first piece?", "14"),
    ("Ines saves $12 a week for 15 weeks and then buys a tent for $128. With what is left she buys fuel bottles at $6 "
     "each. How many bottles can she buy?", "8"),
    ("A school hires buses with 48 seats for 310 pupils and 14 teachers. Each bus costs $95. How many dollars does the "
     "school pay if it hires as few buses as possible?", "665"),
    ("Jonas runs 3 kilometres on Monday and 1.5 kilometres more each day than the day before. How many kilometres has "
     "he run in total by the end of Friday?", "30"),
    ("A tank holds 900 litres. One pipe fills it at 35 litres a minute while a leak loses 5 litres a minute. How many "
     "minutes does it take to fill the empty tank?", "30"),
    ("Four friends share a bill of $92 and add a tip of 25 percent of the bill. If they pay equal parts, how many "
     "dollars and cents does each one pay?", "28.75"),
    ("A library has 1,240 books in English, half as many in Spanish, and 85 fewer in French than in Spanish. How many "
     "books are there in the three languages together?", "2395"),
    ("Pavel plants 7 rows of cabbages with 16 in each row. Snails eat a quarter of them, and he sells the others for "
     "$2 each. How many dollars does he earn?", "168"),
    ("A train leaves with 215 passengers. At the first stop 48 get off and 31 get on; at the second, half of the "
     "passengers get off. How many passengers are then on the train?", "99"),
    ("Lucia makes bracelets of 24 beads. She has 13 packs of 50 beads and loses 20 beads on the floor. How many whole "
     "bracelets can she make?", "26"),
    ("A phone plan costs $18 a month and $0.05 for every message after the first 200. In May Anton sent 460 messages. "
     "How many dollars did he pay in May?", "31"),
    ("A baker needs 3 eggs and 250 grams of flour for each cake. He has 40 eggs and 3 kilograms of flour. How many "
     "whole cakes can he bake?", "12"),
    ("Sofia is 4 times as old as her son. In 6 years the sum of their ages will be 57. How old is the son now?", "9"),
    ("A cinema has 14 rows of 22 seats. On Tuesday 3 rows were closed and 40 of the other seats stayed empty. Each "
     "ticket cost $8. How many dollars did the cinema take in?", "1616"),
    ("Emil walks 650 metres to school and back on each of 5 days, and 2.4 kilometres to his grandmother and back on "
     "Sunday. How many metres does he walk in the week?", "11300"),
    ("A farmer fills 45 crates with 32 apples each. He finds that 1 apple of every 20 is bad and throws these away. "
     "How many good apples does he have?", "1368"),
    ("Nadia pays $540 a month in rent and 30 percent more for her studio. How many dollars does she pay for both in "
     "half a year?", "7452"),
    ("Two printers work together. One prints 18 pages a minute, the other 27. How many minutes do they need for 6 "
     "copies of a report of 120 pages?", "16"),
    ("A gardener mixes 2 parts of sand with 5 parts of soil. He needs 91 kilograms of the mixture. How many kilograms "
     "of soil does he use?", "65"),
    ("Oskar scores 82, 76 and 91 points in three tests. How many points must he score in the fourth to reach a mean of "
     "85?", "91"),
    ("A shop lowers the price of a $160 coat by 15 percent, and then takes another $16 off at the till. How many "
     "dollars does the coat cost in the end?", "120"),
    ("Greta has 3 times as many stickers as Hugo. After she gives him 24, they have equally many. How many stickers "
     "did Greta have at first?", "72"),
    ("A bus drives 60 kilometres in 50 minutes, waits 10 minutes, and drives 90 kilometres in 80 minutes. What is its "
     "mean speed for the whole trip, in kilometres per hour? Round to the nearest whole number.", "64"),
    ("A carpenter cuts a board of 2.8 metres into shelves of 35 centimetres. Each shelf needs 4 screws, and screws "
     "come in boxes of 12. How many boxes does he open?", "3"),
    ("Yusuf buys 6 notebooks and 4 pens for $23. A notebook costs $2.50. How many dollars does one pen cost?", "2"),
    ("A well is 18 metres deep. A snail climbs 5 metres every day and slides back 2 metres every night. On which day "
     "does it reach the top?", "6"),
    ("Clara swims 40 lengths of a 25 metre pool three times a week. After how many weeks has she swum 36 kilometres?",
     "12"),
    ("A theatre group sells 120 tickets for adults at $15 and 85 for children at $9. It pays $640 for the hall and "
     "splits the rest among 5 members. How many dollars does each member get?", "385"),
)  # fmt: skip

INSTRUCTION = "Think step by step, and end with the answer as a number after ####."


def question(index: int) -> str:
    """The text of a prompt; indices past the last problem start over."""
    return f"{PROBLEMS[index % len(PROBLEMS)][0]}\n{INSTRUCTION}"
