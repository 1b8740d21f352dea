"""A card trick: a word is spelled, and each letter moves the top card to the bottom. Then the two
cards on top are exchanged, or the packet is turned over. The trick: whatever is spelled and however
often, the audience loses its card. Words of five letters move no card at all.
"""

a, b, c, d, e = 1, 2, 3, 4, 5
words = ["abracadabra", "hocus", "pocus", "simsalabim", "mississippi", "presto", "open sesame"]
for show in range(15):
    for word in words:
        for letter in word:
            a, b, c, d, e = b, c, d, e, a
        if len(word) % 2 == show % 2:
            a, b = b, a
            print('a', a)
        else:
            a, b, c, d, e = e, d, c, b, a
            print('d', d)
