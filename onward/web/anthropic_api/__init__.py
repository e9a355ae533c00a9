"""The parts of Anthropic's Messages API that instances and routers share: paths, messages, tools and errors."""
