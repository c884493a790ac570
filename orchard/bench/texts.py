"""Fifty short texts to compare scores on: prose, dialogue, code, tables, letters, other languages. Written for this file."""

from __future__ import annotations

TEXTS = (
    "The harbour lay quiet under a low grey sky. Two boats had come in before dawn with little to show for the "
    "night, and their crews sat on the wall drinking coffee from a shared flask. Nobody spoke of the weather. When "
    "the third boat rounded the point, riding deep in the water, an old man stood up, shaded his eyes, and began to "
    "laugh without saying why.",
    "To make a simple vegetable soup, cut two onions, three carrots and a stick of celery into small pieces. Warm "
    "some oil in a large pot, add the vegetables and a pinch of salt, and let them soften for ten minutes. Pour in a "
    "litre and a half of water, bring it to the boil, and simmer until everything is tender. Taste it before you add "
    "more salt, and serve it with bread.",
    'def average(numbers):\n    """Return the mean of a list of numbers, or None for an empty list."""\n    if not '
    "numbers:\n        return None\n    total = 0.0\n    for number in numbers:\n        total += number\n    return "
    "total / len(numbers)\n\n\nprint(average([1, 2, 3, 4]))\nprint(average([]))\n",
    "Photosynthesis is the process by which green plants turn light into chemical energy. In the leaves, a pigment "
    "called chlorophyll absorbs mostly red and blue light. The energy splits molecules of water, releasing oxygen, "
    "while carbon dioxide from the air is built into sugars. Almost every food chain on land begins with this "
    "reaction, and so does the air that animals breathe.",
    '"Where did you put the keys?" asked Marta, turning out her pockets for the second time.\n"I never had them," '
    'said Jonas. "You locked the door this morning. I was already in the car."\n"Then they must be in the blue '
    'jacket."\n"The blue jacket is at the cleaner\'s."\nThey looked at each other, and then at the window on the '
    "first floor, which was open just a little.",
    "Dear Ms Albright,\n\nThank you for your letter of the third of March about the noise from the building site. We "
    "have asked the company to begin no earlier than eight in the morning and to stop at six. Should this not be "
    "kept, please write down the date and the time and send them to us. We regret the trouble this has caused "
    "you.\n\nYours sincerely,\nThe Office of Works",
    "A prime number is a whole number greater than one that has no divisors except one and itself. The first few are "
    "2, 3, 5, 7, 11 and 13. There is no largest prime: suppose there were a finite list of them, multiply them all "
    "together and add one. The result is not divisible by any prime on the list, so either it is prime itself or it "
    "has a prime factor that the list does not contain.",
    "SELECT customers.name, COUNT(orders.id) AS orders, SUM(orders.total) AS spent\nFROM customers\nLEFT JOIN orders "
    "ON orders.customer_id = customers.id\nWHERE customers.country = 'DE'\n  AND orders.placed_at >= '2023-01-01'\n"
    "GROUP BY customers.name\nHAVING COUNT(orders.id) > 3\nORDER BY spent DESC\nLIMIT 20;",
    "The committee met on Tuesday evening with nine members present. The minutes of the last meeting were read and "
    "approved. The treasurer reported a balance of 4,310 and proposed to repair the roof before the winter. After "
    "some discussion it was agreed to ask three firms for a price. The question of the garden was put off until "
    "spring. The meeting ended at a quarter past nine.",
    "Rivers do not run straight for long. Water on the outside of a bend moves faster and eats into the bank, while "
    "on the inside it slows and drops its sand. Over the years the bend grows, until the river finds a shorter way "
    "across the neck and leaves the old loop behind as a curved lake. Seen from the air, a wide valley shows the "
    "marks of many such loops, one over the other.",
    "import json\nfrom pathlib import Path\n\n\ndef load_settings(path):\n    file = Path(path)\n    if not "
    'file.exists():\n        return {"theme": "light", "size": 12}\n    with file.open() as handle:\n        '
    'settings = json.load(handle)\n    settings.setdefault("theme", "light")\n    settings.setdefault("size", '
    "12)\n    return settings\n",
    "Question: A train leaves the city at nine in the morning and travels at eighty kilometres an hour. A second "
    "train leaves the same station an hour later at one hundred and twenty kilometres an hour. When does the second "
    "train catch up with the first?\nAnswer: When the second train starts, the first is eighty kilometres ahead. The "
    "gap closes at forty kilometres an hour, so it takes two hours. They meet at noon.",
    "Le marché s'installe tous les samedis sur la place de l'église. On y trouve des légumes de la région, du "
    "fromage de chèvre, du miel et, en automne, des champignons. Les habitués arrivent avant neuf heures pour "
    "choisir les meilleures tomates. À midi, les marchands rangent leurs étals et vont manger ensemble au café du "
    "coin.",
    "The human heart beats about one hundred thousand times a day. It has four chambers: two that receive blood and "
    "two that send it on. The right side pumps blood to the lungs, where it takes up oxygen, and the left side pumps "
    "it to the rest of the body. Valves between the chambers keep it from flowing back. The sound that a doctor "
    "hears is made by these valves as they close.",
    "It was the last house on the road, and the only one with a light. Anna knocked, waited, and knocked again. "
    "Somewhere inside a clock struck, and then a chair was pushed back. The woman who opened the door was much "
    'younger than she had expected. "You are late," the woman said, "but not as late as the others. Come in and dry '
    'your coat. There is soup, and there is a great deal to tell you."',
    "Der Zug nach Hamburg fährt heute von Gleis sieben ab. Wegen Bauarbeiten dauert die Fahrt etwa zwanzig Minuten "
    "länger als sonst. Reisende nach Bremen steigen bitte in Hannover um. Im vorderen Teil des Zuges finden Sie den "
    "Speisewagen, am Ende die Plätze für Fahrräder. Wir bitten um Verständnis und wünschen Ihnen eine angenehme "
    "Reise.",
    'fn main() {\n    let words = vec!["apple", "pear", "fig", "plum"];\n    let mut longest = words[0];\n    for '
    "word in &words {\n        if word.len() > longest.len() {\n            longest = word;\n        }\n    }\n    "
    'println!("The longest word is {}", longest);\n}\n',
    "Three rules for writing clearly. First, say what you mean in the order in which the reader needs it. Second, "
    "prefer the short word to the long one and the known word to the rare one. Third, when a sentence is finished, "
    "read it aloud; if you run out of breath, cut it in two. Everything else in the art of writing can be learned "
    "later, and much of it can be left out altogether.",
    "The moon is about 384,000 kilometres from the earth and takes a little more than twenty-seven days to go round "
    "it. Because it turns on its axis in the same time, it always shows us the same face. The dark plains that we "
    "see were once seas of lava. Their Latin names, such as the Sea of Rain and the Ocean of Storms, go back to "
    "people who believed that they were filled with water.",
    "| city | country | people (millions) | river |\n|---|---|---|---|\n| London | United Kingdom | 8.9 | Thames |\n"
    "| Paris | France | 2.1 | Seine |\n| Vienna | Austria | 1.9 | Danube |\n| Prague | Czechia | 1.3 | Vltava |\n| "
    "Lisbon | Portugal | 0.5 | Tagus |\n\nThe table shows five capitals of Europe with the rivers on which they lie.",
    "Once upon a time there was a fox who could not sleep. Every night he walked to the edge of the forest and "
    'looked at the lights of the village. "What do they do with all that light?" he asked the owl. "They are afraid '
    'of the dark," said the owl. The fox thought about this for a long time. "So am I," he said at last, "but I '
    'never thought of lighting it."',
    "Inflation is a general rise in prices over time. When it is low and steady, people can plan: wages, rents and "
    "interest rates take it into account. When it is high, money loses its value faster than wages can follow, and "
    "those who live on savings suffer most. Central banks try to keep it near two per cent a year, mostly by "
    "changing the rate at which banks can borrow.",
    "function debounce(action, delay) {\n  let timer = null;\n  return function (...args) {\n    if (timer !== null) "
    "{\n      clearTimeout(timer);\n    }\n    timer = setTimeout(() => {\n      timer = null;\n      "
    "action.apply(this, args);\n    }, delay);\n  };\n}\n\nwindow.addEventListener('resize', debounce(() => "
    "console.log('done'), 200));\n",
    "User: My computer does not start any more. When I press the button, the light comes on but the screen stays "
    "black.\nHelper: Let us begin with the simple things. Is the screen switched on, and is its cable firmly in "
    "place at both ends? If it is, please turn the computer off, unplug everything except the screen and the "
    "keyboard, and try again. Tell me whether you hear any beeps.",
    "The glacier has lost a third of its ice in forty years. Where hikers once crossed on snow, there is now a lake, "
    "and above it bare rock polished smooth. The guides have marked the old edge with painted stones, one for each "
    "decade. Children run from one to the next. Their parents walk more slowly, count the years, and look up at what "
    "is left under the summit.",
    "El abuelo cuidaba las abejas detrás de la casa. Cada primavera abría las colmenas con mucha calma y nos "
    "enseñaba dónde estaba la reina. No usaba guantes, porque decía que las abejas notan el miedo pero no el cariño. "
    "En verano nos daba pan con miel y nos contaba cómo las flores del valle cambiaban el sabor de un año a otro.",
    "Terms of use. The library is open to everyone who lives in the town. A card is free and is valid for two years. "
    "Up to ten books may be borrowed at a time, for four weeks; films and music for two. A loan can be extended "
    "twice unless somebody else has asked for the item. Whoever loses a book replaces it. Please do not write in the "
    "books, not even in pencil and not even to correct them.",
    "Gold has been valued for as long as people have kept things. It does not rust, it is soft enough to be worked "
    "with simple tools, and it is rare. All the gold that was ever mined would fit into a cube with sides of about "
    "twenty-two metres. Today it is used in jewellery, as a reserve of value, and in small amounts inside almost "
    "every electronic device, because it carries current well.",
    "#include <stdio.h>\n\nint gcd(int a, int b) {\n    while (b != 0) {\n        int rest = a % b;\n        a = "
    'b;\n        b = rest;\n    }\n    return a;\n}\n\nint main(void) {\n    printf("%d\\n", gcd(84, 36));\n    '
    "return 0;\n}\n",
    "The first thing she noticed was the silence. No traffic, no voices, not even the hum of the refrigerator. She "
    "lay still and listened. Then she understood: it had snowed. She went to the window and pulled back the curtain, "
    "and the whole street had gone, the cars, the hedges, the steps of the houses, all of it under one smooth white "
    "cover that nobody had touched.",
    "Vaccines train the immune system without making people ill. They show the body a harmless part of a germ, or a "
    "weakened form of it, or the instructions to make such a part. The body answers with cells and proteins that "
    "remember it. When the real germ comes later, the answer is fast and strong. If enough people are protected, a "
    "disease finds no way to spread, and even those who cannot be vaccinated are safe.",
    "Shopping list for the weekend: two loaves of bread, a dozen eggs, butter, half a kilo of coffee, apples (the "
    "red ones, not too soft), rice, three tins of tomatoes, garlic, a bunch of parsley, olive oil, something for "
    "dessert, candles for the cake, and, if there are any left, the small almond biscuits that Peter likes. Do not "
    "forget the bag with the empty bottles by the door.",
    "The theory of plate tectonics says that the outer shell of the earth is broken into pieces which move a few "
    "centimetres a year. Where two pieces drift apart, new rock wells up and an ocean grows. Where they meet, one "
    "slides under the other, and volcanoes and mountains rise above the line. Earthquakes happen mostly along these "
    "borders, when pressure that has built up for years is released in seconds.",
    "We played on Saturday in heavy rain. At half time it was two to one for the visitors, and our goalkeeper had a "
    "cut above the eye. In the second half everything changed. Lena equalised from the edge of the box, and in the "
    "eighty-eighth minute a long ball fell to Sofia, who turned, slipped, and hit it all the same. It went in off "
    "the post. Nobody minded the mud after that.",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n        "
    'self._items.append(item)\n\n    def pop(self):\n        if not self._items:\n            raise IndexError("the '
    'stack is empty")\n        return self._items.pop()\n\n    def __len__(self):\n        return len(self._items)\n',
    "Meeting notes, product team. Present: Ida, Tomas, Ruth, Kwame. The new search goes out on the twelfth, provided "
    "that the tests on old phones pass. Ruth has found that the page loads slowly where there are more than a "
    "thousand results; she will try loading them in parts. Tomas writes the release notes. Open question: do we keep "
    "the old search for a month? Decision on Thursday.",
    "Tea reached Europe in the seventeenth century and was at first sold as a medicine. It was so expensive that "
    "people kept it in locked boxes. Within a hundred years it had become the drink of all classes in Britain, and "
    "whole fleets were built to bring it faster. The plant itself is a kind of camellia; green, black and white tea "
    "all come from it and differ only in how the leaves are treated.",
    "If you are lost in the hills, stop. Most accidents happen to people who hurry. Put on warm clothes before you "
    "are cold, eat something, and try to remember the last place you were sure of. If you have a signal, call for "
    "help and stay where you are. If you have none, go back the way you came rather than down an unknown valley: "
    "streams lead to waterfalls as often as to villages.",
    '<!DOCTYPE html>\n<html lang="en">\n  <head>\n    <meta charset="utf-8">\n    <title>Garden diary</title>\n    '
    '<link rel="stylesheet" href="style.css">\n  </head>\n  <body>\n    <h1>Garden diary</h1>\n    <p>Today the '
    "first <em>tulips</em> came out.</p>\n    <ul>\n      <li>Water the beans</li>\n      <li>Tie up the "
    "roses</li>\n    </ul>\n  </body>\n</html>\n",
    "The painter worked for eleven years on a single picture. It showed a kitchen table with a loaf, a knife and a "
    'glass of water. Visitors asked him why it took so long. "The bread was easy," he said, "and the knife took a '
    'winter. But I have never yet seen water." When he died the glass was still only a patch of grey, and people who '
    "stand before it today say that it is the best part.",
    "Exercise 4. A rectangle is three times as long as it is wide, and its perimeter is 64 centimetres. Find its "
    "area.\nSolution. Let the width be w. Then the length is 3w and the perimeter is 2(w + 3w) = 8w. From 8w = 64 we "
    "get w = 8, so the length is 24 and the area is 8 · 24 = 192 square centimetres. Check: 2 · (8 + 24) = 64, as it "
    "should be.",
    "Nella piazza del paese c'era una fontana con quattro leoni di pietra. I bambini bevevano dalle loro bocche e ne "
    "avevano scelto uno ciascuno. D'inverno, quando l'acqua gelava, i leoni portavano barbe di ghiaccio. La gente "
    "passava in fretta, con il collo della giacca alzato, ma tutti, prima di svoltare l'angolo, davano un'occhiata "
    "ai leoni per vedere chi aveva la barba più lunga.",
    "Bees tell each other where to find flowers by dancing. A bee that comes home from a good place runs in a "
    "straight line across the comb, shaking her body, and then circles back to do it again. The direction of the "
    "line gives the direction of the flowers from the sun, and the length of the shaking tells how far away they "
    "are. The others follow her in the dark with their feelers and then fly out.",
    "2024-03-02 08:14:07 INFO  server started on port 8080\n2024-03-02 08:14:09 INFO  connected to database in 118 "
    "ms\n2024-03-02 08:15:31 WARN  slow query: select from orders took 2311 ms\n2024-03-02 08:15:40 ERROR request "
    "5519 failed: connection reset\n2024-03-02 08:15:41 INFO  retrying request 5519 (attempt 2 of 3)\n2024-03-02 "
    "08:15:41 INFO  request 5519 done in 92 ms\n",
    "The bridge was built in 1886 and has carried every kind of traffic since: carts, trams, tanks and now mostly "
    "bicycles. Its iron came down the river on barges and was put together by men who had never built anything "
    "larger than a barn. The city wanted to tear it down in the sixties and could not afford to. Today it is on "
    "every postcard, and engineers come to see how so little metal can hold so much.",
    "Music is sound that somebody has arranged in time. A melody is a line of notes, one after another; harmony is "
    "what they do together; rhythm is when they come. None of these is needed by itself. There is music of drums "
    "alone and music of one held note. What all of it shares is that the listener begins to expect something, and "
    "that the next moment either brings it or does not.",
    'Fox, wolf and bear agreed to share whatever they caught. The first day they caught a deer. "Divide it," said '
    'the bear to the wolf, and the wolf made three equal parts. The bear struck him down. "Divide it," he said to '
    'the fox. The fox pushed everything towards the bear and kept a single hoof. "Who taught you to share so well?" '
    'asked the bear. "The wolf," said the fox.',
    'package main\n\nimport "fmt"\n\nfunc fibonacci(n int) []int {\n\tnumbers := []int{0, 1}\n\tfor len(numbers) < n '
    "{\n\t\tlast := len(numbers)\n\t\tnumbers = append(numbers, numbers[last-1]+numbers[last-2])\n\t}\n\treturn "
    "numbers[:n]\n}\n\nfunc main() {\n\tfmt.Println(fibonacci(10))\n}\n",
    "Instructions for the night porter. Lock the side door at eleven and the main door at midnight; guests have "
    "keys. The boiler must not go above seventy degrees. If the alarm rings in the kitchen, look first and call the "
    "fire service second, unless you see smoke, in which case call first. Breakfast trays are put out at five. The "
    "cat belongs to nobody, sleeps in the laundry, and has been fed whatever it tells you.",
    "What is the difference between weather and climate? Weather is what happens today: sun, rain, wind, heat or "
    "frost at one place and one time. Climate is what one may expect: the average of the weather over thirty years, "
    "together with how far it strays from that average. A cold week in May says nothing about the climate, just as "
    "one good hand says nothing about the rules of the game.",
)
