"""A card trick: a word is spelled, and each letter moves the top card to the bottom. Then the
packet is turned over. However often this is done, the two neighbours of a card remain its
neighbours, if the bottom is next to the top. So whoever knows the order finds the chosen card.
"""

a, b, c, d, e = 1, 2, 3, 4, 5
words = ["abracadabra", "hocus", "pocus", "simsalabim", "mississippi", "presto", "open sesame"]
for show in range(15):
    for word in words:
        for letter in word:
            a, b, c, d, e = b, c, d, e, a
        a, b, c, d, e = e, d, c, b, a
        if len(word) % 2 == show % 2:
            print('a', a)
        else:
            print('d', d)
    packet = [a, b, c, d, e]
    chosen = packet.index(4)
    assert {packet[chosen - 1], packet[(chosen + 1) % 5]} == {3, 5}
