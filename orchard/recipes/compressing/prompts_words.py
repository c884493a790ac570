"""The words that `prompts` makes its prompts of. None of them is a word that `orchard.evals.following` asks with."""

from __future__ import annotations


def _listed(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(",")]


THINGS = _listed("""
volcanoes, photosynthesis, the printing press, glaciers, gravity, the immune system, coral reefs, compost, democracy,
inflation, electric cars, black holes, the water cycle, vaccines, earthquakes, magnets, the stock market, recycling,
chess, jazz, yoga, solar panels, dinosaurs, rainforests, submarines, the Roman Empire, the Industrial Revolution,
poetry, cheese, green tea, chocolate, robots, computer viruses, the internet, cloud computing, machine learning,
databases, encryption, bridges, lighthouses, tides, deserts, whales, spiders, mushrooms, orchids, DNA, atoms,
electricity, lasers, satellites, telescopes, microscopes, the heart, the lungs, sleep, dreams, memory, stress,
vitamins, exercise, breakfast, cooking rice, budgeting, taxes, insurance, job interviews, public speaking, time
management, teamwork, leadership, negotiation, marketing, remote work, traffic jams, public transport, airplanes,
sailing boats, hot air balloons, castles, pyramids, museums, photography, oil painting, theatre, ballet, the violin,
drums, novels, fairy tales, comic books, board games, football, marathons, skiing, camping, hiking, fishing, knitting,
pottery, origami, gardening, beekeeping, tomatoes, potatoes, olive oil, salt, sourdough, pasta, soup, ice cream,
climate change, wind power, nuclear energy, batteries, plastic waste, endangered species, wolves, elephants, penguins,
owls, butterflies, ants
""")

LANDS = _listed("""
Argentina, Australia, Belgium, Brazil, Chile, Colombia, Denmark, Ethiopia, Finland, Ghana, Iceland, India, Indonesia,
Iran, Israel, Jamaica, Jordan, Laos, Malaysia, Mexico, Morocco, Nepal, New Zealand, Nigeria, Pakistan, the
Philippines, Romania, Rwanda, Scotland, Senegal, Singapore, South Africa, South Korea, Switzerland, Tanzania,
Thailand, Tunisia, Turkey, Ukraine, Uruguay, Venezuela, Vietnam, Wales, Zambia
""")

TOWNS = _listed("""
Aberdeen, Bangkok, Barcelona, Bergen, Bilbao, Bogota, Bristol, Calgary, Cape Town, Chicago, Cologne, Cork, Delhi,
Geneva, Ghent, Hamburg, Helsinki, Houston, Istanbul, Jakarta, Krakow, Lagos, Leeds, Lyon, Manila, Melbourne, Milan,
Montreal, Mumbai, Naples, Osaka, Porto, Quito, Riga, Split, Sydney, Toronto, Turin, Utrecht, Valencia
""")

PEOPLE = _listed("""
Aisha, Albert, Amir, Beatrice, Bruno, Carlos, Chen, Daniela, Diego, Edith, Elias, Fatima, Felix, Georgia, Hannah,
Hassan, Ingrid, Isaac, Jamal, Joanna, Julia, Kenji, Kofi, Laura, Lucas, Magnus, Mei, Miguel, Nadia, Noah, Olga, Omar,
Pedro, Priya, Quentin, Rachel, Ravi, Rosa, Samuel, Sarah, Stefan, Tara, Ursula, Victor, Wanda, Xavier, Yusuf, Zoe
""")

FAMOUS = _listed("""
Marie Curie, Isaac Newton, Albert Einstein, Leonardo da Vinci, Mahatma Gandhi, Nelson Mandela, Cleopatra, Julius
Caesar, Napoleon, Abraham Lincoln, Martin Luther King, Rosa Parks, Charles Darwin, Galileo, Mozart, Beethoven, Vincent
van Gogh, Frida Kahlo, Jane Austen, Mark Twain, Leo Tolstoy, Homer, Plato, Confucius, Amelia Earhart, Neil Armstrong,
Ada Lovelace, Alan Turing, Florence Nightingale, Winston Churchill, Joan of Arc, Marco Polo, Christopher Columbus,
Nikola Tesla
""")

EVENTS = _listed("""
the moon landing, the French Revolution, the fall of the Berlin Wall, the First World War, the Renaissance, the Great
Depression, the American Civil War, the invention of the wheel, the discovery of penicillin, the Silk Road, the gold
rush, the Cold War, the Black Death, the first Olympic Games, the building of the Great Wall, the sinking of the
Titanic
""")

INVENTIONS = _listed("""
telephone, light bulb, steam engine, airplane, vacuum cleaner, zipper, camera, microscope, bicycle pump, elevator,
refrigerator, typewriter, parachute, barometer, dishwasher, calculator, compass, helicopter, sewing machine, World
Wide Web
""")

TRADES = _listed("""
architect, astronaut, beekeeper, biologist, blacksmith, bus driver, chemist, chef, dentist, detective, electrician,
firefighter, fisherman, geologist, goldsmith, gardener, journalist, judge, librarian, locksmith, mechanic, miner,
optician, pharmacist, photographer, potter, programmer, sailor, surgeon, tailor, translator, veterinarian, violinist
""")

OBJECTS = _listed("""
tent, kettle, backpack, camera, carpet, sofa, drill, ladder, blanket, guitar, helmet, keyboard, suitcase, telescope,
teapot, toaster, vase, wallet, watch, wheelbarrow, printer, pillow, desk, bench, basket, candle, curtain, fan, jacket,
necklace, oven, pan, scarf, shovel, skateboard, tractor, violin, whistle
""")

CREATURES = _listed("""
parrot, sheep, donkey, llama, turkey, goose, hamster, turtle, camel, alpaca, peacock, pony, buffalo, pigeon, ostrich,
swan, reindeer, monkey, lizard, tiger, zebra, giraffe, seal, otter
""")

GOODS = _listed("""
carrots, onions, eggs, candles, pencils, bricks, tickets, bananas, oranges, lemons, shirts, socks, plates, cups,
spoons, envelopes, stamps, batteries, light bulbs, nails, screws, cookies, muffins, sandwiches, magazines, posters,
tiles
""")

SORTS = _listed("""
musical instrument, kitchen tool, canal, metal, language, dance, card game, flower, spice, board game, feeling, shape,
fabric, insect, reptile, dessert, breakfast food, hobby, means of transport, school subject, piece of furniture,
programming language, gemstone, kind of weather, drink, toy, website, holiday, mountain, lake, part of the body, kind
of shoe, bird of prey, sea animal, type of bread, kind of pasta, musical style, sculptor, poet, scientist, inventor,
superhero, chemical element, currency
""")

DESCRIBING = _listed("""
ancient, angry, brave, bright, broken, calm, careful, cheap, clever, cloudy, curious, dangerous, deep, delicious,
eager, elegant, fair, famous, fierce, foggy, fragile, fresh, friendly, gentle, generous, giant, golden, graceful,
greedy, honest, huge, humble, icy, lazy, lonely, lucky, modern, muddy, narrow-minded, nervous, noisy, patient, polite,
proud, quick, rare, rough, round, rusty, shallow, shiny, shy, silent, simple, sleepy, smooth, stubborn, tall, tidy,
tired, warm, wild, wise
""")

NOUNS = _listed("""
anchor, balloon, bottleneck, cactus, carriage, cloud, compass, cottage, diamond, engine, feather, fence, forest,
fountain, goose, hammer, harbor, island, jungle, knee, lantern, leaf, letter, market, meadow, mouse, needle, ocean,
orchard, palace, pebble, pencil, pirate, comet, puzzle, rocket, saddle, shadow, ship, shoulder, smoke, stairs, storm,
thunder, tooth, tower, tunnel, valley, village, wagon, whisper, wing, wolf, woman, youth
""")

MATTERS = _listed("""
learn a language, save money, sleep better, find a new flat, make friends in a new town, prepare for an exam, write a
cover letter, train a puppy, fix a flat tire, cook for ten guests, plan a weekend trip, choose a laptop, stop
procrastinating, start running, read more, organize a birthday party, ask for a raise, deal with a noisy neighbour,
clean a stained shirt, grow herbs on a balcony, pack for a journey, remember names, write a short story, give honest
feedback, calm down before a talk, meditate, drink more water, take better photos, paint a wall, repair a bicycle,
build a shelf, teach a child to read, stay safe online
""")

WRITINGS = _listed("""
an email to a colleague about a delayed report, a thank-you note to a neighbour, a birthday wish for a grandmother, an
apology for missing a meeting, an invitation to a picnic, a complaint about a late parcel, a short story about a lost
key, a poem about the wind, a product description of a water bottle, a slogan for a bakery, a tweet about a concert, a
haiku about a frog, a letter to a future self, a review of a restaurant, a job advert for a cook, a toast for a
wedding, a diary entry of a sailor, a news headline about a storm, a dialogue between two robots, a riddle about a
candle, a limerick about a cat on a ship, a summary of a fairy tale, a speech about kindness, a text message to a
friend who is ill, a menu for a small cafe, a packing list
""")

PROGRAMS = _listed("""
reverses a string, checks whether a number is prime, counts the vowels of a word, finds the largest number in a list,
sorts names by length, removes duplicates from a list, converts Celsius to Fahrenheit, computes a factorial, reads a
file line by line, merges two dictionaries, checks for a palindrome, prints the first ten squares, sums the digits of
a number, splits a sentence into words, generates a random password, counts words in a text, computes an average
""")

SENTENCES = _listed("""
The train was late and everybody was cold, I dont know where is my keys, She sing beautifully every evening, The food
was awful and the waiter ignored us, What a wonderful film with brilliant actors, We need to finish this work right
now, He go to the market yesterday, The room was small but very clean and quiet, The battery died after a single day,
I would buy this tent again without thinking, Me and him was playing outside, The children laughed while the clown
fell over, Our team lost although we played well, This book changed how I think about history, The meeting could have
been an email, Somebody left the gate open and the sheep ran away, It rained so hard that the road disappeared, The
soup needs more salt, They has two brothers and one sister, The package arrived broken and nobody answers my calls
""")

TONGUES = _listed("French, Spanish, German, Italian, Dutch, Swedish, Latin")
WEEKDAYS = _listed("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
SIGHTS = _listed("""
the old mill, the town hall, the swimming pool, the bus stop, the post office, the bakery, the castle gate, the
harbor, the market hall, the concert hall, the zoo, the bridge, the sports field, the cafe by the lake, the lecture
room
""")
COLOURS = _listed("crimson, beige, teal, ivory, navy blue, olive, scarlet, lilac, amber, maroon, cream, charcoal")
