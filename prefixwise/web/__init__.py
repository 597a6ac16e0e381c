"""The page: plain HTML, style sheets and JavaScript modules, as they are sent. Nothing here is built or compiled."""
