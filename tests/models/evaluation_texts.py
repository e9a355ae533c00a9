"""Text to judge a quantized model by: prose and code that come with Python, and a chat. None of it calibrates anything."""

import heapq
import inspect
import statistics
import textwrap
from pydoc_data import topics

CHAT = """<|im_start|>user
Can you explain why the sky looks blue during the day but red in the evening?<|im_end|>
<|im_start|>assistant
Sunlight contains all colors. When it passes through the atmosphere, air molecules scatter short wavelengths such as blue
much more strongly than long wavelengths such as red. During the day, the scattered blue light reaches your eyes from
every direction, so the sky appears blue. In the evening the light travels through much more air before it reaches you.
Most of the blue has been scattered away by then, and what remains is orange and red.<|im_end|>
<|im_start|>user
Thanks! And what about clouds, why are they white?<|im_end|>
<|im_start|>assistant
Clouds are made of water droplets that are much larger than the wavelength of light. Droplets of that size scatter all
colors about equally, so the mixture that reaches your eyes still looks white. When a cloud is very thick, less light
makes it to the bottom, and it looks grey.<|im_end|>
<|im_start|>user
Write a short poem about the sea.<|im_end|>
<|im_start|>assistant
The sea is wide, the sea is deep,
It rocks the weary ships to sleep.
The waves roll in, the waves roll out,
And gulls above them wheel about.<|im_end|>
<|im_start|>user
How do I make pancakes for four people?<|im_end|>
<|im_start|>assistant
Here is a simple recipe. Mix two cups of flour, two tablespoons of sugar, one tablespoon of baking powder and half a
teaspoon of salt. In another bowl, whisk two eggs, one and a half cups of milk and three tablespoons of melted butter.
Pour the wet ingredients into the dry ones and stir until they are just combined. Heat a pan, add a little butter, and
pour in small ladles of batter. Flip each pancake when bubbles appear on top.<|im_end|>
<|im_start|>user
I have a job interview next week and I am nervous. What should I do?<|im_end|>
<|im_start|>assistant
It is normal to be nervous, and there are a few things that help. First, learn about the company: what it makes, who its
customers are, and what it has announced lately. Second, think of three or four situations in which you solved a problem,
worked with others, or learned from a mistake, and practice telling each of them in two minutes. Third, prepare some
questions of your own, since an interview goes both ways. On the day itself, arrive ten minutes early, breathe slowly,
and remember that they invited you because they liked what they read.<|im_end|>
<|im_start|>user
What is the difference between a list and a tuple in Python?<|im_end|>
<|im_start|>assistant
Both hold a sequence of values. A list can be changed after it was made: you can append to it, remove from it, or replace
its elements. A tuple cannot be changed, so it can be used as a key of a dictionary, and readers know that it will stay
as it is. Use a list for a collection that grows or shrinks, and a tuple for a few values that belong together, such as
the coordinates of a point.<|im_end|>
<|im_start|>user
My plant has yellow leaves. Is it getting too much water or too little?<|im_end|>
<|im_start|>assistant
Yellow leaves can mean either, so look at the soil. If it is wet a few centimeters below the surface, and the leaves are
soft, the plant gets too much water: let it dry out, and make sure that the pot has a hole at the bottom. If the soil is
dry and the leaves are crisp at the edges, it needs more. Water it thoroughly, wait until the top of the soil is dry, and
then water it again.<|im_end|>
"""


def texts() -> dict[str, str]:
    prose = "\n\n".join(topics.topics[name] for name in ("naming", "exceptions", "customization", "import"))
    code = "\n".join(inspect.getsource(module) for module in (textwrap, heapq, statistics))
    return {"prose": prose, "code": code, "chat": CHAT}
